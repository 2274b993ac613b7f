"""x times one matrix per group of rows, in plain jnp: the meaning of the op."""

import jax
import jax.numpy as jnp

from lora_jax.ops.grouped_matmul.weights import Weight, plain
from lora_jax.typing import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def row_to_group(group_sizes: Int[Array, "groups"], num_rows: int) -> Int[Array, "rows"]:
    """Return the group of each row of rows sorted by group; rows after the last group give -1."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, rows, side="right").astype(jnp.int32)
    return jnp.where(rows < ends[-1], group, -1)


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
) -> Float[Array, "rows d_out"]:
    """y[t] = w[g] @ x[t] + bias[g], g the group of row t; 0 for rows in no group.

    Sums are in float32 and rounded once. A quantised w is dequantised first: its values are
    computed in float32 and rounded once to the dtype of the plain weight.
    """
    w = plain(w)
    group = row_to_group(group_sizes, x.shape[0])
    f32 = jnp.float32

    def add_group(y, one):
        g, w_g, bias_g = one
        z = jnp.einsum("ti,oi->to", x, w_g, preferred_element_type=f32, precision=HIGHEST)
        z = z + bias_g.astype(f32)[None]
        return jnp.where((group == g)[:, None], z, y), None

    groups, d_out, _ = w.shape
    bias = jnp.zeros((groups, d_out), w.dtype) if bias is None else bias
    start = jnp.zeros((x.shape[0], d_out), f32)
    y, _ = jax.lax.scan(add_group, start, (jnp.arange(groups, dtype=jnp.int32), w, bias))
    return y.astype(x.dtype)
