"""Splits a model over several devices, or says why its sizes do not allow it."""

from collections.abc import Sequence
from typing import Any

import jax

from lora_jax.config import ModelConfig
from lora_jax.config.split_sizes import attention_output, check_divides, expert_split
from lora_jax.ops.all_gather import open_group
from lora_jax.sharding import UNIT, Split, make_mesh


def make_split(
    config: ModelConfig, size: int, *, expert_parallel: bool | None = None
) -> Split | None:
    """Return the split of a model over the first `size` devices; None for one device.

    `expert_parallel` True gives each device some experts whole, False a part of every expert; None
    does the first where the number of experts divides.

    Raises:
        ValueError: there are fewer devices, or devices of several kinds, or a size of the model
            does not divide among them.
    """
    if size < 1:
        raise ValueError(f"A model is over at least 1 device, not {size}.")
    experts = expert_split(config, size, expert_parallel)
    if size == 1:
        return None
    devices = jax.devices()
    if len(devices) < size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but there are {len(devices)} devices "
            f"({devices[0].device_kind}). Lower it, or let this process see more of them."
        )
    _check_kinds(devices[:size])
    check_divides(config, size, experts, UNIT if jax.default_backend() == "gpu" else 1)
    group = open_group(size)
    mesh, output = make_mesh(size), attention_output(config)
    if group is None:
        return Split(mesh, experts, attention_output=output)
    return Split(mesh, experts, group.number, group.check, output)


def _check_kinds(devices: Sequence[Any]) -> None:  # jax.Device
    """Raise ValueError for devices of several kinds, whose kernels may give other bits."""
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) > 1:
        raise ValueError(
            f"A model over {len(devices)} devices needs them of one kind, and these are "
            f"{', '.join(kinds)}: their results would have other bits. Let this process see those "
            "of one kind (CUDA_VISIBLE_DEVICES), and give an instance hosts of one kind."
        )
