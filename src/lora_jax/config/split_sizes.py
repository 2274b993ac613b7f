"""Sizes of a model that must divide among the devices it is split over. No jax."""

from lora_jax.config._types import ModelConfig

_MOST_SHARE = 32


def expert_split(config: ModelConfig, size: int, expert_parallel: bool | None) -> str:
    """Return how experts lie on the devices: "ep" whole, "tp" a part of each.

    `expert_parallel` asks for one of them; None takes "ep" where the number of experts divides.
    Raises ValueError for what was asked for in vain.
    """
    if config.moe is None:
        if expert_parallel:
            raise ValueError(
                f"enable_expert_parallel is for models with experts; {config.model_type} has none."
            )
        return "ep"
    divides = config.moe.num_experts % size == 0
    if expert_parallel and not divides:
        raise ValueError(
            f"enable_expert_parallel: {config.moe.num_experts} experts do not divide among {size} "
            "devices. Leave it out: each device then has a part of every expert."
        )
    return "ep" if divides and expert_parallel is not False else "tp"


def attention_output(config: ModelConfig) -> str:
    """Return how attention's last map, o, lies on the devices: "whole" on each, or in "parts".

    It is whole where its weight is at most a 32nd of an expert layer's: each device then does
    without one exchange of the layer.
    """
    if config.moe is None:
        return "parts"
    heads, moe = config.num_heads, config.moe
    d_in = heads * (config.head_dim if config.mla is None else config.mla.v_dim)
    experts = 3 * moe.num_experts * moe.intermediate_size
    return "whole" if d_in * _MOST_SHARE <= experts else "parts"


def check_divides(config: ModelConfig, size: int, experts: str, unit: int = 1) -> None:
    """Raise ValueError naming every size of the model that does not divide among the devices.

    A device's part of a map's outputs must be a multiple of `unit`: with other widths its kernels
    are not those that one device would use.
    """
    wrong = [f"{name} {count}" for name, count in _counts(config, experts).items() if count % size]
    for name, count in _widths(config, experts).items():
        part = count // size
        if count % size or part % unit:
            wrong.append(f"{name} {count}" + (f" (parts of {unit})" if unit > 1 else ""))
    if wrong:
        raise ValueError(
            f"A {config.model_type} model over {size} devices: {', '.join(wrong)} must divide by "
            f"{size}. Choose another tensor_parallel_size" + _other_split(config, size, experts)
        )


def _counts(config: ModelConfig, experts: str) -> dict[str, int]:
    """Return what is split by number."""
    counts = {"num_attention_heads": config.num_heads}
    if config.mla is None:
        counts["num_key_value_heads"] = config.num_kv_heads
    if config.moe is not None and experts == "ep":
        counts["num_experts"] = config.moe.num_experts
    return counts


def _widths(config: ModelConfig, experts: str) -> dict[str, int]:
    """Return the widths of outputs that are split."""
    widths, moe = {"hidden_size": config.hidden_size}, config.moe
    widths["outputs of q_proj"] = config.num_heads * config.head_dim
    if config.mla is None:
        widths["outputs of k_proj"] = config.num_kv_heads * config.head_dim
    if moe is None or len(moe.layers) < config.num_layers:
        widths["intermediate_size"] = config.intermediate_size
    if moe is not None and experts == "tp":
        widths["moe_intermediate_size"] = moe.intermediate_size
    if moe is not None and moe.shared_size:
        widths["width of the shared experts"] = moe.shared_size
    return widths


def _other_split(config: ModelConfig, size: int, experts: str) -> str:
    """Return what else could be changed."""
    if config.moe is not None and experts == "tp" and config.moe.num_experts % size == 0:
        return ", or enable_expert_parallel."
    return "."
