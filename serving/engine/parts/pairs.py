"""Options of an engine that do not work together, or not with a model, told before anything is
loaded. No jax.
"""

import dataclasses

from lora_jax.config import ModelConfig
from lora_jax.config.split_sizes import check_divides, expert_split
from serving.api.config import EngineConfig
from serving.engine.memory.sizing import longest_wanted

INT8 = "int8"  # lora_dtype
OFF = "off"  # lora_merge
LABELS, GAINS = "max_lora_cls_labels", "enable_dora_and_bias"
VOCABULARY = ("max_lora_trainable_tokens", "max_lora_modules_to_save")


@dataclasses.dataclass(frozen=True)
class Beside:
    """Parts that an engine has beside those of its config."""

    lora_server: bool = False  # or tenants
    tenants: bool = False  # processes that hold an adapter each, and compute it
    several_hosts: bool = False  # over which the model is split
    shared_backbone: bool = False


def check_pairs(config: EngineConfig, model: ModelConfig, beside: Beside) -> None:
    """Raise ValueError naming options that do not go together, or are beyond the model."""
    has_server = beside.lora_server
    longest_wanted(config, model.max_positions)
    if beside.tenants:
        check_tenants(config)
    check_speculation(config, has_server=has_server)
    check_storage(config)
    check_page_pool(config, beside)
    if beside.several_hosts:
        check_hosts(config, model)
    check_images(model, beside)
    check_merging(config, model, has_server=has_server)
    check_heads(config, has_server=has_server)
    check_brought(config, has_server=has_server)
    check_targets(config, beside)
    check_split(config, model, has_server=has_server)


def check_speculation(config: EngineConfig, *, has_server: bool) -> None:
    """Raise ValueError for what cannot be served together with speculation."""
    if has_server and config.speculation is not None:
        raise ValueError(
            "speculative_config is for engines that compute all of an adapter: leave it out, or "
            "keep the adapters on the instances instead of a LoRA Server."
        )


def check_tenants(config: EngineConfig) -> None:
    """Raise ValueError for what an engine has no use for whose adapters are in other processes.

    Those compute plain LoRA, in the dtype of the model, on all modules that an adapter changes.
    """
    refused = {
        "speculative_config": config.speculation is not None,
        f"lora_dtype {config.lora_dtype}": config.lora_dtype != "auto",
        "lora_target_modules": config.lora_target_modules is not None,
        **{name: bool(getattr(config, name)) for name in (LABELS, GAINS, *VOCABULARY)},
    }
    if wrong := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"{', '.join(wrong)} does not go with isolation 'server', whose engine does not have "
            "the adapters: leave it out, or use isolation 'process'."
        )


def check_storage(config: EngineConfig) -> None:
    """Raise ValueError for what adapters in 8 bits do not go with."""
    if config.lora_dtype != INT8:
        return
    if config.lora_merge != OFF or config.merge_adapter is not None:
        raise ValueError(
            "lora_merge and merge_adapter add adapters to the weights, and rows in 8 bits are not "
            "what their files say: leave lora_dtype int8 out, or merge none."
        )


def check_page_pool(config: EngineConfig, beside: Beside) -> None:
    """Raise ValueError for what a page pool does not go with."""
    if config.page_pool_bytes is None:
        return
    refused = {
        f"tensor_parallel_size {config.tensor_parallel_size}": config.tensor_parallel_size > 1,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes is not None,
        "lora_memory_bytes": config.lora_memory_bytes is not None,
        "esft_memory_bytes": config.esft_memory_bytes is not None,
        "kv_offloading_size": bool(config.kv_offloading_size),
        f"lora_merge {config.lora_merge}": config.lora_merge != OFF,
        "merge_adapter": config.merge_adapter is not None,
        **{field.replace("_", " "): has for field, has in dataclasses.asdict(beside).items()},
    }
    if reasons := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"page_pool_bytes does not go with {', '.join(reasons)}: KV pages and adapters share "
            "its bytes on one device. Leave one of them out."
        )


def check_hosts(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError for what a model that is split over several hosts does not go with."""
    if model.vision is not None:
        raise ValueError(
            f"{model.model_type} takes images, which one process serves: start it with --nnodes 1, "
            "on the devices of one host."
        )
    refused = {
        "max_esft_adapters": config.max_esft_adapters,
        "kv_offloading_size": config.kv_offloading_size,
    }
    if wrong := [name for name, value in refused.items() if value]:
        raise ValueError(f"An instance over several hosts has no {' and '.join(wrong)}: set 0.")


def check_images(model: ModelConfig, beside: Beside) -> None:
    """Raise ValueError for what a model that takes images does not work together with."""
    if model.vision is None:
        return
    if beside.lora_server:
        raise ValueError(
            f"{model.model_type} takes images, which a LoRA Server does not serve yet: "
            "start without lora_server."
        )
    if beside.shared_backbone:
        raise ValueError(
            f"{model.model_type} takes images, which functions do not serve yet: start without "
            "functions."
        )


def check_merging(config: EngineConfig, model: ModelConfig, *, has_server: bool) -> None:
    """Raise ValueError for what merged weights do not go with."""
    merges, primary = config.lora_merge != OFF, config.merge_adapter
    if not merges and primary is None:
        return
    flag = f"lora_merge {config.lora_merge}" if merges else f"merge_adapter {primary}"
    name, _ = flag.split(" ", 1)
    off = f"{name} to off" if merges else f"no {name}"
    if merges and primary is not None:
        raise ValueError(
            f"{flag} merges adapters in turn, and merge_adapter {primary} merges one for good: set "
            "one of them."
        )
    if model.quantization is not None:
        raise ValueError(
            f"{flag} adds adapters to the base's weights, and quantised weights would be rounded "
            f"anew: {config.model} is quantised. Set {off}, or serve a base in 16 bits."
        )
    if config.lora_dtype != "auto":
        raise ValueError(
            f"{flag} adds rank rows to weights of the same dtype: set lora_dtype to auto, not "
            f"{config.lora_dtype}, or set {off}."
        )
    if config.tensor_parallel_size > 1:
        raise ValueError(
            f"{flag} is for one device: set tensor_parallel_size to 1, not "
            f"{config.tensor_parallel_size}, or set {off}."
        )
    if has_server:
        raise ValueError(
            f"{flag} merges adapters of this engine, and a LoRA Server holds those of this one: "
            f"set {off}, or start without --lora-server."
        )


def check_heads(config: EngineConfig, *, has_server: bool) -> None:
    """Raise ValueError where a LoRA Server holds the adapters, and heads were asked for."""
    if has_server and config.max_lora_cls_labels:
        raise ValueError(
            "Task heads are not served beside a LoRA Server yet: set max_lora_cls_labels to 0, "
            "or keep the adapters on the instances."
        )


def check_brought(config: EngineConfig, *, has_server: bool) -> None:
    """Raise ValueError where room for more than LoRA was asked for in vain."""
    why = why_only_lora(config, has_server=has_server)
    for flag in (GAINS, *VOCABULARY):
        if getattr(config, flag) and why:
            raise ValueError(f"{flag} does not go with {why}: leave {flag} out, or the other.")
    if getattr(config, VOCABULARY[1]) and config.lora_dtype == INT8:
        raise ValueError(
            f"{VOCABULARY[1]} does not go with lora_dtype int8, which has a scale for each rank "
            f"row: leave {VOCABULARY[1]} out, or the other."
        )


def check_targets(config: EngineConfig, beside: Beside) -> None:
    """Raise ValueError where modules were chosen of adapters that other processes hold."""
    if config.lora_target_modules is None:
        return
    if beside.lora_server:
        raise ValueError(
            "lora_target_modules is for adapters that the instances hold, and a LoRA Server "
            "computes whole layers of experts: leave lora_target_modules out, or start without "
            "--lora-server."
        )


def why_only_lora(config: EngineConfig, *, has_server: bool) -> str:
    """Return which feature does not go with adapters that bring more than LoRA; "" for none."""
    if has_server:
        return "a LoRA Server, which holds plain LoRA"
    if config.tensor_parallel_size > 1:
        return f"tensor_parallel_size {config.tensor_parallel_size}"
    if config.merge_adapter is not None:
        return f"merge_adapter {config.merge_adapter}, which changes the weights under them"
    return ""


def check_split(config: EngineConfig, model: ModelConfig, *, has_server: bool) -> None:
    """Raise ValueError for a model that cannot be split over the devices."""
    size = config.tensor_parallel_size
    experts = expert_split(model, size, config.enable_expert_parallel)
    if size == 1:
        return
    check_divides(model, size, experts)
    if has_server and experts != "ep":
        raise ValueError(
            "A LoRA Server serves devices that have whole experts: choose a tensor_parallel_size "
            f"that divides their number, not {size}."
        )
