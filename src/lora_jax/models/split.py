"""Splits a model over several devices, or says why its sizes do not allow it."""

import jax

from lora_jax.config import ModelConfig
from lora_jax.ops.all_gather import open_group
from lora_jax.sharding import UNIT, Split, make_mesh


def make_split(
    config: ModelConfig, size: int, *, expert_parallel: bool | None = None
) -> Split | None:
    """Return the split of a model over the first `size` devices; None for one device.

    `expert_parallel` True gives each device some experts whole, False a part of every expert; None
    does the first where the number of experts divides.

    Raises:
        ValueError: there are fewer devices, or a size of the model does not divide among them.
    """
    if size < 1:
        raise ValueError(f"A model is over at least 1 device, not {size}.")
    experts = _experts(config, size, expert_parallel)
    if size == 1:
        return None
    devices = jax.devices()
    if len(devices) < size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but there are {len(devices)} devices "
            f"({devices[0].device_kind}). Lower it, or let this process see more of them."
        )
    check_divides(config, size, experts, UNIT if jax.default_backend() == "gpu" else 1)
    group = open_group(size)
    if group is None:
        return Split(make_mesh(size), experts)
    return Split(make_mesh(size), experts, group.number, group.check)


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


def _experts(config: ModelConfig, size: int, expert_parallel: bool | None) -> str:
    """Return how experts are split; ValueError for what was asked for in vain."""
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
