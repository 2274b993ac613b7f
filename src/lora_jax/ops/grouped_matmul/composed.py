"""Addends and gated activation around any implementation's product: what the fused kernel means."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.ops.dispatch import lazy_kernel
from lora_jax.ops.grouped_matmul.weights import Weight
from lora_jax.typing import Array, Float, Int

_SILU_OF_EXPERTS = lazy_kernel("lora_jax.ops.silu_times", "silu_of_experts")


def grouped_matmul(
    product: Callable[..., Float[Array, "rows d_out"]],
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
    addend: Float[Array, "rows d_out"] | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] + addend[t] of rows in groups, y = product(x, w, group_sizes, bias), else 0.

    The sum is in float32 and rounded once more: an addend of 0 changes no bit.
    """
    y = product(x, w, group_sizes, bias)
    if addend is None:
        return y
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    real = rows < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(real[:, None], plus(y, addend), y)


def plus(
    y: Float[Array, "rows d_out"], addend: Float[Array, "rows d_out"]
) -> Float[Array, "rows d_out"]:
    """y + addend in float32, rounded once."""
    return (y.astype(jnp.float32) + addend.astype(jnp.float32)).astype(y.dtype)


def gated_matmul(
    product: Callable[..., Float[Array, "rows d_out"]],
    x: Float[Array, "rows d_in"],
    w_gate: Weight,
    w_up: Weight,
    group_sizes: Int[Array, "groups"],
    gate_addend: Float[Array, "rows d_out"] | None = None,
    up_addend: Float[Array, "rows d_out"] | None = None,
    *,
    activation: Callable[..., Float[Array, "rows d_out"]] | None = None,
) -> Float[Array, "rows d_out"]:
    """silu(gate) * up, both as grouped_matmul gives them.

    `activation` computes it of gate, up and the number of real rows; None: `silu_times`.
    """
    gate, up = (
        grouped_matmul(product, x, w, group_sizes, None, addend)
        for w, addend in ((w_gate, gate_addend), (w_up, up_addend))
    )
    if activation is not None:
        return activation(gate, up, jnp.sum(group_sizes, dtype=jnp.int32))
    return silu_times(gate, up)


def gated_by_platform(
    product: Callable[..., Float[Array, "rows d_out"]], *args: Any
) -> Float[Array, "rows d_out"]:
    """Same by `silu_of_experts`, as results of a LoRA Server: a GPU's silu is not XLA's."""
    return gated_matmul(product, *args, activation=_SILU_OF_EXPERTS)


def silu_times(
    gate: Float[Array, "rows width"], up: Float[Array, "rows width"]
) -> Float[Array, "rows width"]:
    """silu(gate) * up in float32, rounded once."""
    wide = gate.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(wide) * up.astype(jnp.float32)).astype(gate.dtype)
