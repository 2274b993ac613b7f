"""The frozen dataclasses that a model class is built from."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; the fields after `theta` are those of the scaling kinds that use them."""

    kind: str  # default, linear, llama3 or yarn
    dim: int  # rotated part of a head
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0  # multiplies cos and sin ("attention factor")
    # M-RoPE: how many frequencies turn by time, row and column; they follow each other in blocks,
    # or (interleaved) frequency i turns by row where i % 3 is 1, by column where it is 2.
    sections: tuple[int, int, int] | None = None
    interleaved_sections: bool = False


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """GPT-OSS's gate: (clip(up, ±limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)."""

    alpha: float
    limit: float


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts in the layers `layers`; the others are dense."""

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[int, ...]
    softmax_first: bool = True  # softmax over all experts, then top-k; else over the top-k only
    topk_norm: float | None = None  # p of the norm the chosen weights are divided by
    weight_scale: float = 1.0
    num_groups: int = 1  # experts are chosen from the best `topk_groups` of `num_groups`
    topk_groups: int = 1
    shared_size: int = 0  # width of the MLP every token also goes through
    bias: bool = False  # on router and experts
    swiglu: ClampedSwiglu | None = None


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: K and V are low-rank in one latent of `kv_lora_rank`."""

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Format that the files store weights in; which weights, their tensors show."""

    method: str  # quant_method: the library whose names and layout the files have
    format: str  # nf4, fp4, int4, mxfp4 or fp8
    group_size: int | None = None  # weights of a row that share a scale; None: whole rows, or said
    block: tuple[int, int] | None = None  # rows and columns that share a scale (FP8)
    symmetric: bool = True  # no zero points (int4)
    zero_offset: int = 0  # added to stored zero points (GPTQ's first format)
    desc_act: bool = (
        False  # columns may be grouped in another order, which each map must tell (GPTQ)
    )
    kv_scales: bool = False  # the files may have scales of KV pages, too, which nothing needs


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The tower that turns image patches into rows of the language model's width.

    `family` is qwen3_vl, qwen2_5_vl or clip. `merge_size` squared patches become one row.
    """

    family: str
    num_layers: int  # that are computed; CLIP's last one is not
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int  # pixels
    temporal_patch_size: int  # times that a still image stands in a patch
    merge_size: int
    out_size: int
    norm_eps: float
    image_token_id: int
    num_positions: int = 0  # rows of the learned position table
    deepstack: tuple[int, ...] = ()  # layers whose output is added to the first language layers
    window_size: int = 0  # pixels of a window's side
    full_layers: tuple[int, ...] = ()  # layers without windows, where there are windows
    image_size: int = 0  # pixels of the side of every image; 0: images keep their shape

    @property
    def head_dim(self) -> int:
        """Columns of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches of one row, side by side."""
        return self.hidden_size * self.merge_size**2


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model class. `dtype` is that of the weights in the config, or None."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of q and k
    intermediate_size: int  # of dense MLPs
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    attention_scale: float
    sliding_windows: tuple[int | None, ...]  # per layer
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    clip_qkv: float | None = None
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    vision: VisionConfig | None = None
    dtype: str | None = None
    quantization: QuantizationConfig | None = None
    original: str | None = None  # name of the model that a quantised one was made of
    eos_token_ids: tuple[int, ...] = ()

    @property
    def experts(self) -> MoeConfig:
        """The MoE part; ValueError if the config has none."""
        if self.moe is None:
            raise ValueError(f"{self.model_type} needs experts, and its config has none.")
        return self.moe

    @property
    def latent(self) -> MlaConfig:
        """The MLA part; ValueError if the config has none."""
        if self.mla is None:
            raise ValueError(f"{self.model_type} needs latent attention, and its config has none.")
        return self.mla

    @property
    def tower(self) -> VisionConfig:
        """The vision part; ValueError if the config has none."""
        if self.vision is None:
            raise ValueError(f"{self.model_type} needs a vision tower, and its config has none.")
        return self.vision
