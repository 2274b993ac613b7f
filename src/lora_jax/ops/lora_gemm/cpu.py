"""Adds adapters row by row, in place on each y, by the C++ kernel of ops/cpu/lora.h."""

from collections.abc import Sequence

import jax
import numpy as np

from lora_jax.ops.cpu import build
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.typing import Array, Float


def lora_gemm(
    ys: Sequence[Float[Array, "rows d_out"] | None],
    batch: LoraBatch,
    sites: Sequence[int | None],
) -> tuple[Float[Array, "rows d_out"], ...]:
    """Same results as the reference; a row's depends on its own x, y and adapter only.

    All sites are one call, which is given the tables whole: to cut a site out of them is a copy.
    """
    build.require()
    ys = [batch.zeros() if y is None else y for y in ys]
    outs = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in ys]
    rows, wide = "int8_" if batch.has_int8_rows else "", ys[0].dtype
    name = f"lora_jax_lora_{rows}{batch.x.dtype.name}"
    name += "" if wide == batch.x.dtype else f"_to_{wide.name}"
    tables = (batch.a_pool, batch.b_pool, batch.entries, batch.scaling)
    first = (batch.x, *tables, batch.row_to_slot, batch.row_to_expert)
    aliases = {len(first) + i: i for i in range(len(ys))}
    call = jax.ffi.ffi_call(name, outs, input_output_aliases=aliases)
    of_table = np.array([0 if site is None else site for site in sites], np.int64)
    return tuple(call(*first, *ys, max_rank=np.int64(batch.max_rank), sites=of_table))
