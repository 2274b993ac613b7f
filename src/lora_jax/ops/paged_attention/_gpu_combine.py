"""Puts the parts of attention's chunks together, in the order of their positions."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.paged_attention import _gpu_sums as sums_of
from lora_jax.ops.paged_attention._gpu_schedule import (
    LOWEST,
    AttentionConfig,
    AttentionSchedule,
    AttentionSizes,
)
from lora_jax.typing import Array, Float

WIDE = 128  # columns of V that a CTA puts together
TOGETHER = 4  # parts that are read side by side


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("dtype", "sizes", "config", "interpret"))
def combine(
    parts: Float[Array, "parts kv_heads v_dim rows"],
    tops: Float[Array, "parts kv_heads rows"],
    totals: Float[Array, "parts kv_heads rows"],
    sinks: Float[Array, "kv_heads rows"],
    schedule: AttentionSchedule,
    dtype: jnp.dtype,
    sizes: AttentionSizes,
    config: AttentionConfig,
    interpret: hopper.Interpret,
) -> Float[Array, "query_rows v_dim"]:
    """Return the result of a cut call; 0 for tokens without parts."""
    tokens, rows = schedule.num_parts.shape[0], sizes.rows
    max_chunks = sizes.max_chunks(config.chunk)
    width = WIDE if sizes.v_dim % WIDE == 0 else hopper.COLUMNS

    def _combine_kernel(num_ref, parts_ref, tops_ref, totals_ref, sinks_ref, out_ref, o_smem):
        token, head = lax.axis_index("token"), lax.axis_index("head")
        columns = pl.ds(lax.axis_index("piece") * width, width)

        num, load = num_ref[token], functools.partial(plgpu.load, optimized=False)

        def read(i):
            """Return a part; after the last one of nothing, which changes no sum."""
            at = token * max_chunks + lax.min(i, num - 1)
            top = load(tops_ref.at[at, head], layout=sums_of.OF_QUERY)
            total = load(totals_ref.at[at, head], layout=sums_of.OF_QUERY)
            more = load(parts_ref.at[at, head, columns], layout=sums_of.WGMMA)
            return top + jnp.where(i < num, jnp.float32(0), jnp.float32(LOWEST)), total, [more]

        def some(i, sums):
            # All are asked for before any is awaited.
            for part in [read(i * TOGETHER + n) for n in range(TOGETHER)]:
                sums = sums_of.add(sums, part)
            return sums

        rounds = lax.div(num + (TOGETHER - 1), jnp.int32(TOGETHER))
        sums = lax.fori_loop(0, rounds, some, sums_of.nothing(rows, width))
        sums_of.store_rows(o_smem, sums_of.finished(sums, sinks_ref.at[head]))
        sums_of.put_token(o_smem, out_ref.at[:, columns], sizes, token, head, 0)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        _combine_kernel,
        out_type=jax.ShapeDtypeStruct((tokens * sizes.q_heads, sizes.v_dim), dtype),
        grid=(tokens, sizes.kv_heads, sizes.v_dim // width),
        grid_names=("token", "head", "piece"),
        scratch_types=[plgpu.SMEM((rows, width), dtype)],
        interpret=interpret or False,
    )
    return kernel(schedule.num_parts, parts, tops, totals, sinks)
