"""Gain and shift of outputs by each row's adapter: what DoRA and biases need of a step."""

from collections.abc import Sequence

import jax.numpy as jnp

from lora_jax.adapters.gains import gain_name
from lora_jax.adapters.slots import A_OFFSET, RANK
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.lora_gemm.batch import float_rows
from lora_jax.typing import Array, Float


def has_gains(routing: AdapterRouting, modules: Sequence[str | None]) -> bool:
    """Return whether an adapter may scale one of these modules' outputs."""
    names = {gain_name(m) for m in modules if m is not None}
    return routing.brings and not names.isdisjoint(routing.module_names)


def add_gains(
    ys: Sequence[Float[Array, "rows _"]],
    routing: AdapterRouting,
    modules: Sequence[str | None],
    layer: int,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return each y + gain * y + shift of every row's adapter at (module, layer), in float32.

    `ys` have the adapters' LoRA already. Rows whose adapter has no gain there come back bit for
    bit, and a y whose module no adapter can scale is the y itself.
    """
    if not routing.brings:
        return tuple(ys)
    pairs = zip(ys, modules, strict=True)
    return tuple(y if m is None else _add_gain(y, routing, gain_name(m), layer) for y, m in pairs)


def _add_gain(
    y: Float[Array, "rows width"], routing: AdapterRouting, gain: str, layer: int
) -> Float[Array, "rows width"]:
    adapters = routing.adapters
    if adapters is None or gain not in routing.module_names:
        return y
    entries = adapters.entries[routing.module_names.index(gain), layer]
    of_row = entries[jnp.maximum(routing.row_to_slot, 0)]
    has = (routing.row_to_slot >= 0) & (of_row[:, RANK] > 0)
    first = jnp.where(has, of_row[:, A_OFFSET], 0)
    pool = adapters.pools[str(y.shape[1])]
    gains, shifts = float_rows(pool[first]), float_rows(pool[first + 1])
    wide = y.astype(jnp.float32)
    return jnp.where(has[:, None], (wide + (gains * wide + shifts)).astype(y.dtype), y)
