"""Engine configuration, checked once, with vLLM's names. No jax."""

import dataclasses

from lora_jax.adapters.task_head import MAX_LABELS
from lora_jax.adapters.vocabulary import MOST_TOKENS
from lora_jax.hub_folder import folder_name
from serving.api.generation_config import FROM_MODEL, check_fields
from serving.api.sampling import MAX_LOGPROBS
from serving.api.speculative_config import SpeculativeConfig

DTYPES = ("auto", "float32", "bfloat16")
LORA_DTYPES = ("auto", "int8")
GIVEN_MODULES = ("auto",)  # lora_target_modules: what adapters given at the start change
KV_DTYPES = ("auto", "fp8")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
POLICIES = ("fcfs", "sjf")
MERGE_MODES = ("off", "exact", "auto")
DEFAULT_IMAGES = 8  # of one prompt
CPU_SEQS, CPU_TOKENS = 32, 512  # of one step


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits of one engine; a value out of bounds is a ValueError naming it.

    None asks for a value derived from the model and the machine. Bytes are bytes, times are
    seconds.
    """

    model: str  # folder with config.json, safetensors and tokenizer files
    served_model_name: str | None = None  # None: the folder's name
    dtype: str = "auto"  # "auto": what the checkpoint says
    load_format: str = "auto"  # "dummy": random weights from config.json alone
    max_model_len: int | None = None  # None: the model's, or what the KV pages can hold
    max_num_seqs: int | None = None  # sequences in one step; None: by the device
    max_num_batched_tokens: int | None = None  # tokens in one step; None: see device_sizes
    mixed_step_tokens: int | None = None  # in one where sequences decode; None: see device_sizes
    # Devices of this engine, over which the model is split, and whether its experts are split by
    # expert: None where their number divides, else along their outputs.
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool | None = None
    block_size: int = 16  # tokens in one KV page
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"  # of KV pages; "auto": the model's
    page_pool_bytes: int | None = None  # that KV pages and adapters share; None: a part for each
    kv_offloading_size: float = 0.0  # GiB of host memory for KV pages that leave the device
    gpu_memory_utilization: float = 0.9  # of what JAX may use, for weights, adapters and KV pages
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # "sjf": the smallest prompt + max_tokens first
    max_queue: int = 1024  # waiting sequences; more is QueueFull
    seed: int = 0  # from which requests without a seed get theirs
    max_logprobs: int = MAX_LOGPROBS
    chat_template: str | None = None  # a Jinja file, or its text, in place of the model's
    generation_config: str = FROM_MODEL  # where sampling's defaults are; "vllm": nowhere
    override_generation_config: dict = dataclasses.field(default_factory=dict, hash=False)
    # Images.
    limit_mm_per_prompt: dict = dataclasses.field(default_factory=dict, hash=False)  # image: 8
    mm_processor_kwargs: dict = dataclasses.field(default_factory=dict, hash=False)
    mm_processor_cache_gb: float = 1.0  # GiB of host memory for images that were prepared before
    encoder_cache_tokens: int | None = None  # of images on the device; None: up to 16384
    language_model_only: bool = False  # load no tower; images are refused
    # Adapters.
    max_loras: int = 16  # resident LoRA adapters
    max_lora_rank: int = 64
    # Modules that adapters may change, as PEFT names them, or GIVEN_MODULES; None: all.
    lora_target_modules: tuple[str, ...] | None = None
    # Labels of the largest task head; 0: no heads, None: those of the adapters given at the start.
    max_lora_cls_labels: int | None = None
    # Adapters with DoRA and biases; None: if adapters given at the start have them.
    enable_dora_and_bias: bool | None = None
    # Trained tokens of an adapter, and whole embeddings and heads of all adapters on the device; 0:
    # none, None: what the adapters given at the start have.
    max_lora_trainable_tokens: int | None = None
    max_lora_modules_to_save: int | None = None
    lora_dtype: str = "auto"  # of adapters in memory; "auto": the model's
    lora_dir: str | None = None  # the only folder adapters may be loaded from at run time
    max_esft_adapters: int | None = None  # resident ones; None: 16 if model and device can
    max_esft_experts: int = 16  # of one ESFT adapter in one layer
    esft_memory_bytes: int | None = None  # their experts' pages; None: as esft_parts says
    lora_memory_bytes: int | None = None  # rank rows of resident adapters; None: from the two above
    max_adapter_bytes: int = 4 << 30  # files of one adapter
    max_total_adapter_bytes: int = 16 << 30  # host memory of all loaded adapters
    max_cpu_loras: int | None = None  # adapters in host memory; None: as many as have room
    max_adapter_loads_per_minute: int = 600
    adapter_wait_s: float = 600.0  # longest wait of a request for an adapter slot
    adapter_load_chunks_per_step: int = 8  # writes to the slots between two steps
    compile_base_only_steps: bool = True  # steps without an adapter have programs of their own
    # Merged weights: "exact": rows of the merged adapter only, "auto": in a mixture with others.
    lora_merge: str = "off"
    lora_merge_theta: float = 0.05  # seconds that a sequence may be left out of steps for it
    merge_adapter: str | None = None  # serve this adapter alone, merged into the weights
    structured_outputs: bool = True  # programs of steps in which a grammar binds a row
    # Speculation: method, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max; {}: none.
    speculative_config: dict = dataclasses.field(default_factory=dict, hash=False)
    otlp_traces_endpoint: str | None = None  # where spans of requests are sent; None: nowhere

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a folder, got {self.model!r}.")
        for field, allowed in CHOICES:
            if (value := getattr(self, field)) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}.")
        for field, low, high in _INT_BOUNDS:
            _check_int(field, getattr(self, field), low, high)
        for field, low, high in _OPTIONAL_INT_BOUNDS:
            if getattr(self, field) is not None:
                _check_int(field, getattr(self, field), low, high)
        for field in _SWITCHES:
            if not isinstance(value := getattr(self, field), bool):
                raise ValueError(f"{field} must be true or false, got {value!r}.")
        for field in _OPTIONAL_SWITCHES:
            if not isinstance(value := getattr(self, field), bool | None):
                raise ValueError(f"{field} must be true or false, got {value!r}.")
        self._check_devices()
        self._check_modules()
        SpeculativeConfig.of(self.speculative_config)  # raises ValueError
        if not isinstance(self.override_generation_config, dict):
            raise ValueError(
                f"override_generation_config must map names to values, got "
                f"{self.override_generation_config!r}."
            )
        check_fields(self.override_generation_config, "override_generation_config")
        _check_images(self.limit_mm_per_prompt, self.mm_processor_kwargs)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {share!r}.")
        wait = self.adapter_wait_s
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 < wait <= 86400:
            raise ValueError(f"adapter_wait_s must be in (0, 86400], got {wait!r}.")
        theta = self.lora_merge_theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 <= theta <= 60:
            raise ValueError(f"lora_merge_theta must be in [0, 60], got {theta!r}.")
        _check_gib("mm_processor_cache_gb", self.mm_processor_cache_gb)
        self._check_offloading()
        if (self.max_num_batched_tokens or self.step_tokens) < (self.max_num_seqs or 1):
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})."
            )
        mixed = self.mixed_step_tokens
        if mixed is not None and mixed < (self.max_num_seqs or 1):
            raise ValueError(
                f"mixed_step_tokens ({mixed}) must be at least max_num_seqs ({self.max_num_seqs})."
            )

    def _check_offloading(self) -> None:
        """Raise ValueError for a size of host memory that is none, or that nothing would fill."""
        _check_gib("kv_offloading_size", self.kv_offloading_size)
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size keeps pages of the prefix cache: set it to 0, or turn "
                "enable_prefix_caching on."
            )

    def _check_modules(self) -> None:
        """Raise ValueError for names that are none; keep a list as a tuple."""
        names = self.lora_target_modules
        if names is None:
            return
        listed = isinstance(names, list | tuple) and names
        if not listed or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                f'lora_target_modules must be a list of names such as ["q_proj", "v_proj"], got '
                f"{names!r}."
            )
        object.__setattr__(self, "lora_target_modules", tuple(names))

    def _check_devices(self) -> None:
        """Raise ValueError for what needs several devices."""
        if self.tensor_parallel_size == 1 and self.enable_expert_parallel:
            raise ValueError(
                "enable_expert_parallel shares experts among several devices: set "
                "tensor_parallel_size to their number."
            )

    @property
    def model_name(self) -> str:
        """The name under which the base model answers."""
        return self.served_model_name or folder_name(self.model)

    @property
    def max_images(self) -> int:
        """Most images of one prompt."""
        return self.limit_mm_per_prompt.get("image", DEFAULT_IMAGES)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Settings of speculation; None: it is off."""
        return SpeculativeConfig.of(self.speculative_config)

    @property
    def max_drafts(self) -> int:
        """Most tokens of a draft."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def step_seqs(self) -> int:
        """Sequences in one step; those of a CPU where none are asked for."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        tokens = self.max_num_batched_tokens, self.mixed_step_tokens
        return min([CPU_SEQS, *(most for most in tokens if most is not None)])

    @property
    def step_tokens(self) -> int:
        """Tokens in one step; those of a CPU where none are asked for."""
        return self.max_num_batched_tokens or max(CPU_TOKENS, self.max_num_seqs or 0)

    @property
    def max_logit_rows(self) -> int:
        """Most tokens of one step whose logits are computed."""
        return max(self.step_seqs, 64)


_SWITCHES = (
    "enable_prefix_caching",
    "compile_base_only_steps",
    "structured_outputs",
    "language_model_only",
)
_OPTIONAL_SWITCHES = ("enable_expert_parallel", "enable_dora_and_bias")
CHOICES = (
    ("dtype", DTYPES),
    ("kv_cache_dtype", KV_DTYPES),
    ("lora_dtype", LORA_DTYPES),
    ("load_format", LOAD_FORMATS),
    ("scheduling_policy", POLICIES),
    ("lora_merge", MERGE_MODES),
)
_INT_BOUNDS = (
    ("tensor_parallel_size", 1, 64),
    ("block_size", 1, 256),
    ("max_queue", 1, 1_000_000),
    ("seed", -(2**63), 2**63 - 1),
    ("max_logprobs", 0, MAX_LOGPROBS),
    ("max_loras", 1, 4096),
    ("max_lora_rank", 1, 1024),
    ("max_esft_experts", 1, 65536),
    ("max_adapter_bytes", 1, 1 << 50),
    ("max_total_adapter_bytes", 1, 1 << 50),
    ("max_adapter_loads_per_minute", 1, 1_000_000),
    ("adapter_load_chunks_per_step", 1, 1_000_000),
)


_OPTIONAL_INT_BOUNDS = (
    ("max_num_seqs", 1, 1024),
    ("max_num_batched_tokens", 1, 65536),
    ("mixed_step_tokens", 1, 65536),
    ("max_model_len", 1, 1 << 50),
    ("kv_cache_memory_bytes", 1, 1 << 50),
    ("lora_memory_bytes", 1, 1 << 50),
    ("page_pool_bytes", 1, 1 << 50),
    ("esft_memory_bytes", 1, 1 << 50),
    ("max_esft_adapters", 0, 4096),
    ("max_lora_cls_labels", 0, MAX_LABELS),
    ("max_lora_trainable_tokens", 0, MOST_TOKENS),
    ("max_lora_modules_to_save", 0, 4096),
    ("max_cpu_loras", 1, 1 << 20),
    ("encoder_cache_tokens", 1, 1 << 24),
)


def _check_images(limits: object, kwargs: object) -> None:
    if not isinstance(limits, dict) or set(limits) - {"image"}:
        raise ValueError(
            f'limit_mm_per_prompt must be like {{"image": 4}}, got {limits!r}: video and audio '
            "are not supported."
        )
    if "image" in limits:
        _check_int("limit_mm_per_prompt", limits["image"], 0, 999)
    if not isinstance(kwargs, dict):
        raise ValueError(f"mm_processor_kwargs must map names to values, got {kwargs!r}.")


def _check_gib(field: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size <= 1 << 20:
        raise ValueError(f"{field} must be 0 to {1 << 20} GiB, got {size!r}.")


def _check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be an integer, got {value!r}.")
    if not low <= value <= high:
        raise ValueError(f"{field} must be in [{low}, {high}], got {value}.")
