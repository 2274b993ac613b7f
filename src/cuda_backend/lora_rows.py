"""Adds adapters to rows by csrc/lora_gemm/rows.cuh: what the tensor cores' kernels do not take.

A row's result depends on nothing but its own x, y and adapter. Each row reads its adapter's rows
itself, which many rows of one adapter make slow; a loop of XLA's would make the host wait as well.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

MAX_RANK = 8192  # h lies in shared memory
MAX_WIDTH = 65535 * 512
WIDE = jnp.dtype(jnp.float32)


def check_support(y: jax.ShapeDtypeStruct | Array, x: Array, max_rank: int) -> None:
    """Raise Declined, saying why, for what the kernel does not serve."""
    if x.dtype not in (WIDE, jnp.bfloat16) or y.dtype not in (WIDE, x.dtype):
        raise Declined(f"cuda lora_rows takes no {x.dtype} to {y.dtype}")
    if x.shape[0] < 1 or y.shape[1] > MAX_WIDTH or not 1 <= max_rank <= MAX_RANK:
        sizes = f"{x.shape[0]} rows of {x.shape[1]} to {y.shape[1]} by rank {max_rank}"
        raise Declined(
            f"cuda lora_rows takes up to {MAX_WIDTH} columns and ranks to {MAX_RANK}, not {sizes}"
        )


def lora_rows(
    ys: Sequence[Float[Array, "rows d_out"]],
    tables: Sequence[tuple[Int[Array, "sites slots 5"], Float[Array, "sites slots"]]],
    sites: Sequence[int],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    max_rank: int,
) -> tuple[Float[Array, "rows d_out"], ...]:
    """y[t] + s * sum_j (x[t] . A[j]) B[j], as lora_jax.ops.lora_gemm says; h is in float32.

    Tables are of one site, without the first axis, or of all.
    """
    for y in ys:
        check_support(y, x, max_rank)
    ffi.require()
    owners, done = (row_to_slot, row_to_expert), []
    for y, table, site in zip(ys, tables, sites, strict=True):
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        call = jax.ffi.ffi_call("lora_jax_cuda_lora_rows", shape, input_output_aliases={0: 0})
        attributes = {"site": np.int64(site), "max_rank": np.int64(max_rank)}
        done.append(call(y, x, a_pool, b_pool, *table, *owners, **attributes))
    return tuple(done)
