"""Adds adapters whose rank rows are in 8 bits to rows, by the kernels of csrc/lora_gemm/int8.cuh.

A row's result depends on nothing but its own x, y and adapter. Tensor cores multiply the int8 as
they are, and the scales of A and B multiply h, which is rounded to bfloat16 once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.rank_rows import value_width
from lora_jax.typing import Array, Float, Int

PART = 2048  # columns of x that are summed up by themselves, kInt8Part there
STEP = 16  # ranks are rounded up to so many


def lora_int8(
    modules: Sequence[tuple[Array | None, Array, Array]],
    x: Float[Array, "rows d_in"],
    a_pool: Int[Array, "a_rows a_items"],
    b_pool: Int[Array, "b_rows b_items"],
    order: Int[Array, "rows"],
    items: Int[Array, "rows 4"],
    num_items: Int[Array, "1"],
    max_rank: int,
    sites: Sequence[int],
) -> Sequence[Float[Array, "rows d_out"]]:
    """Return each module's y with its adapters added: modules are (y, entries, scaling).

    No y is None, or all are: then rows without an adapter are zeros. Items are of up to 32 rows.
    """
    accumulate, count = modules[0][0] is not None, len(modules)
    parts, ranks = -(-x.shape[1] // PART), -(-max_rank // STEP) * STEP
    sums = jax.ShapeDtypeStruct((parts, count, x.shape[0], ranks), jnp.float32)
    out = jax.ShapeDtypeStruct((x.shape[0], value_width(b_pool.shape[1], b_pool.dtype)), x.dtype)
    aliases = {6 + 3 * m: 1 + m for m in range(count if accumulate else 0)}
    shapes = [sums, *[out] * count]
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_int8", shapes, input_output_aliases=aliases)
    operands = (v for m in modules for v in m if v is not None)
    attributes = {"max_rank": np.int64(max_rank), "accumulate": accumulate}
    places = np.array(sites, np.int64)
    return call(x, a_pool, b_pool, order, items, num_items, *operands, sites=places, **attributes)[
        1:
    ]
