"""Sums of attention in registers of the Mosaic kernels: [positions or columns of V, queries].

Queries are wgmma's N operand: what there is one of for each, as its maximum, is a row.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops.paged_attention._gpu_schedule import ALIGN, LOWEST, AttentionSizes

WGMMA = plgpu.Layout.WGMMA
OF_QUERY = WGMMA.reduce(0)
FLIPPED = plgpu.Layout.WGMMA_TRANSPOSED
PART = 256  # columns of V


def iota(shape: tuple[int, ...], axis: int):
    """Return each place's index along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def _full(shape: tuple[int, ...], value: float, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def zeros(height: int, rows: int):
    """Return sums of nothing."""
    return _full((height, rows), 0.0, WGMMA)


def wide(of_query, height: int):
    """Return [rows] as [height, rows]."""
    return lax.broadcast_in_dim(of_query, (height, *of_query.shape), (1,))


def columns_of(v_dim: int) -> list:
    """Return the columns of V that are multiplied at a time: all sums would fill the registers."""
    return [pl.ds(c, min(PART, v_dim - c)) for c in range(0, v_dim, PART)]


def nothing(rows: int, v_dim: int):
    """Return what chunks are added to: maxima, weights' sums, sums of V by parts of its columns."""
    acc = tuple(zeros(columns.size, rows) for columns in columns_of(v_dim))
    return _full((rows,), LOWEST, OF_QUERY), _full((rows,), 0.0, OF_QUERY), acc


def add(before, more):
    """Return the sums of two runs of positions; scaled by powers of two, which rounds nothing."""
    top = jnp.maximum(before[0], more[0])
    old, new = jnp.exp2(before[0] - top), jnp.exp2(more[0] - top)
    total = before[1] * old + more[1] * new
    acc = (
        a * wide(old, len(a)) + b * wide(new, len(a))
        for a, b in zip(before[2], more[2], strict=True)
    )
    return top, total, tuple(acc)


def finished(sums, sinks_ref):
    """Return the result of all chunks' sums, [v_dim, rows] by parts."""
    sink = plgpu.load(sinks_ref, layout=OF_QUERY, optimized=False)
    top = jnp.maximum(sums[0], jnp.round(sink))
    old = jnp.exp2(sums[0] - top)
    total = sums[1] * old + jnp.exp2(sink - top)
    return [a * wide(old, len(a)) / wide(total, len(a)) for a in sums[2]]


def store_rows(o_smem, o) -> None:
    """Write o^T, when what was copied from there before has left."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for columns, part in zip(columns_of(o_smem.shape[1]), o, strict=True):
        part = plgpu.layout_cast(part, FLIPPED).astype(o_smem.dtype)
        o_smem.at[:, columns].transpose((1, 0))[...] = part
    plgpu.commit_smem()


def put_token(o_smem, out_ref, sizes: AttentionSizes, token, head, first) -> None:
    """Copy a token's rows of one kv head from its tile, which begins at row `first`."""
    low = first + lax.rem(head * sizes.group, jnp.int32(ALIGN))
    row = token * sizes.q_heads + head * sizes.group

    def put(i, _):
        plgpu.copy_smem_to_gmem(o_smem.at[low + i], out_ref.at[row + i], commit_group=False)

    lax.fori_loop(0, sizes.group, put, None)
