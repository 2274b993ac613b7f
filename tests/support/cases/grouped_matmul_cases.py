"""Configs and inputs of the Mosaic kernel of grouped products."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cases import GroupedCase, grouped_case
from lora_jax.ops.grouped_matmul._gpu_tiles import (
    GroupedMatmulConfig,
)

# Two warpgroups, of which the second has no columns in the last tile; two parts on the way out.
WIDE = GroupedMatmulConfig(columns=64, warpgroups=2, rows=64, stages=3, ctas=1)
TALL = GroupedMatmulConfig(columns=128, warpgroups=1, rows=8, stages=4, ctas=2)
# Half as many stages, each of twice as much of d_in.
DEEP = GroupedMatmulConfig(columns=64, warpgroups=1, rows=16, stages=2, ctas=1, step=128)


def some_case(sizes: tuple[int, ...], popularity: str, **options) -> GroupedCase:
    """Return a bfloat16 case; with a bias where the number of rows is odd."""
    rows, padding, groups, d_out, d_in = sizes
    options = {"dtype": "bfloat16", "padding": padding, "bias": rows % 2 == 1, **options}
    return grouped_case(rows, groups, d_out, d_in, popularity=popularity, **options)


def arrays(case: GroupedCase) -> tuple:
    return case.x, case.w, case.group_sizes, case.bias


def some_addends(case: GroupedCase, rows: int, count: int, dtype: str) -> tuple[jax.Array, ...]:
    """Return random addends of which every third row is 0, and rows in no group are NaN."""
    rng = np.random.default_rng(3)
    shape = (case.x.shape[0], case.w.shape[1])
    some = [np.array(rng.standard_normal(shape), np.float32) for _ in range(count)]
    for array in some:
        array[::3] = 0
        array[rows:] = np.nan
    return tuple(jnp.asarray(a.astype(jnp.dtype(dtype))) for a in some)
