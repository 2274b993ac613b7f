"""x times one matrix per group of rows: a loop over (group, block of rows), portable JAX."""

import jax
import jax.numpy as jnp

from lora_jax.ops.grouped_matmul.weights import Weight, plain
from lora_jax.typing import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def grouped_matmul(
    x: Float[Array, "rows d_in"],
    w: Weight,
    group_sizes: Int[Array, "groups"],
    bias: Float[Array, "groups d_out"] | None,
) -> Float[Array, "rows d_out"]:
    """Same result as the reference; reads the matrices of groups that have rows, and only those.

    A quantised matrix is made plain once a block of rows.
    """
    rows, groups = x.shape[0], w.shape[0]
    if groups == 1:
        y = _dot(x, plain(w[0]))
        y = y if bias is None else y + bias.astype(jnp.float32)
        real = jnp.arange(rows, dtype=jnp.int32) < group_sizes[0]
        return jnp.where(real[:, None], y, jnp.float32(0)).astype(x.dtype)
    block = _block_rows(rows, groups)
    starts, ends = _row_ranges(group_sizes)
    blocks = (ends - starts + block - 1) // block
    block_ends = jnp.cumsum(blocks, dtype=jnp.int32)

    def one_block(i, y):
        g = jnp.searchsorted(block_ends, i, side="right").astype(jnp.int32)
        row = starts[g] + (i - block_ends[g] + blocks[g]) * block
        z = _dot(jax.lax.dynamic_slice_in_dim(padded, row, block), plain(w[g]))
        z = z if bias is None else z + bias[g].astype(jnp.float32)[None]
        inside = row + jnp.arange(block, dtype=jnp.int32) < ends[g]
        old = jax.lax.dynamic_slice_in_dim(y, row, block)
        new = jnp.where(inside[:, None], z.astype(x.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(y, new, row, 0)

    padded = jnp.pad(x, ((0, block), (0, 0)))
    y = jnp.zeros((rows + block, w.shape[1]), x.dtype)
    return jax.lax.fori_loop(0, block_ends[-1], one_block, y)[:rows]


def _dot(x: Float[Array, "rows d_in"], w: Float[Array, "d_out d_in"]) -> Float[Array, "rows d_out"]:
    """Return x w^T in float32."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, precision=HIGHEST, preferred_element_type=jnp.float32)


def _block_rows(rows: int, groups: int) -> int:
    """Return rows per block: one while they are few, else 8 to 128 as groups are long."""
    if rows <= 8:
        return 1
    per_group = max(1, rows // groups)
    return min(128, max(8, 1 << (per_group - 1).bit_length()))


def _row_ranges(
    group_sizes: Int[Array, "groups"],
) -> tuple[Int[Array, "groups"], Int[Array, "groups"]]:
    """Return the first row of each group and the row after its last."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return ends - group_sizes, ends
