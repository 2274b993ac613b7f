"""Merges adapters into weights on a TPU: one pass over all matrices of a module, in place.

A block of a matrix is read, gets the product of its rank rows added and is written back, while the
next one comes. Rank rows are read in windows that begin at a multiple of eight rows of their pool,
and are turned and masked in VMEM: what lies around them changes no bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

LANES = 128
ALIGN = 8  # rows that a window begins at
TILE = 16  # rows that it consists of, whatever the dtype
ROW_BLOCK, COLUMN_BLOCK = 512, 1024  # of a matrix in VMEM
VMEM_BYTES = 96 << 20  # v5e and v6e have 128 MiB


@dataclasses.dataclass(frozen=True)
class _MergeSizes:
    """Static sizes of one call."""

    window: int  # rank rows in VMEM, with those that alignment adds
    rows: int  # of a block
    columns: int
    itemsize: int

    @property
    def vmem_bytes(self) -> int:
        """Bytes of all blocks, each twice, and of sums and rank rows in float32."""
        block, ranks = self.rows * self.columns, self.window * (self.rows + self.columns)
        return (4 * block + 2 * ranks) * self.itemsize + 4 * (2 * block + 2 * ranks)


def merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    max_rank: int,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> Float[Array, "matrices d_out d_in"]:
    """Same result as the reference; products of the dtype given, sums in float32, one rounding.

    `interpret` None runs on a TPU only; parameters run the kernel interpreted on any device, and
    False compiles it for the target at hand.

    Raises:
        Declined: not on a TPU; no matrices; widths that are no multiple of 128; pools
            of other than whole eights of rows, or of less than a window; or more than VMEM holds.
    """
    if interpret is None and jax.default_backend() != "tpu":
        raise Declined("merge: the TPU kernel runs on a TPU only")
    sizes = _sizes(w, a_pool, b_pool, max_rank)
    a_start, a_shift = _window(sites[:, 0], a_pool, sizes)
    b_start, b_shift = _window(sites[:, 1], b_pool, sizes)
    table = (a_start, a_shift, b_start, b_shift, sites[:, 2], scaling)
    return pl.pallas_call(
        _merge_kernel,
        out_shape=jax.ShapeDtypeStruct(w.shape, w.dtype),
        grid_spec=_grid_spec(w.shape, sizes, len(table)),
        input_output_aliases={len(table): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            vmem_limit_bytes=sizes.vmem_bytes + (16 << 20),
        ),
        interpret=interpret or False,
        name="merge",
    )(*table, w, a_pool, b_pool)


def _grid_spec(
    shape: tuple[int, ...], sizes: _MergeSizes, tables: int
) -> pltpu.PrefetchScalarGridSpec:
    """Return which block of which matrix is worked on when, and with which windows."""
    matrices, d_out, d_in = shape
    block = pl.BlockSpec((None, sizes.rows, sizes.columns), lambda m, o, i, *_: (m, o, i))
    a_window = pl.BlockSpec(
        (pl.Element(sizes.window), pl.Element(sizes.columns)),
        lambda m, o, i, a_start, *_: (pl.multiple_of(a_start[m], ALIGN), i * sizes.columns),
    )
    b_window = pl.BlockSpec(
        (pl.Element(sizes.window), pl.Element(sizes.rows)),
        lambda m, o, i, a, s, b_start, *_: (pl.multiple_of(b_start[m], ALIGN), o * sizes.rows),
    )
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=tables,
        grid=(matrices, d_out // sizes.rows, d_in // sizes.columns),
        in_specs=[block, a_window, b_window],
        out_specs=block,
    )


def _sizes(w: Array, a_pool: Array, b_pool: Array, max_rank: int) -> _MergeSizes:
    """Return the sizes of a call, or decline it."""
    matrices, d_out, d_in = w.shape
    if matrices == 0 or d_in % LANES or d_out % LANES or 0 in (d_in, d_out):
        raise Declined(
            f"merge: {matrices} matrices of {d_out} x {d_in}; the TPU kernel takes some of "
            f"multiples of {LANES}"
        )
    window = -(-(max_rank + ALIGN - 1) // TILE) * TILE
    rows = [len(a_pool), len(b_pool)]
    if min(rows) < window or any(n % ALIGN for n in rows):
        raise Declined(
            f"merge: pools of {rows[0]} and {rows[1]} rows; for ranks to {max_rank} the TPU kernel "
            f"takes multiples of {ALIGN} from {window} on"
        )
    blocks = (_largest_block(d_out, ROW_BLOCK), _largest_block(d_in, COLUMN_BLOCK))
    sizes = _MergeSizes(window, *blocks, w.dtype.itemsize)
    if sizes.vmem_bytes > VMEM_BYTES:
        raise Declined(
            f"merge: rank {max_rank} takes {sizes.vmem_bytes} bytes of VMEM, more than {VMEM_BYTES}"
        )
    return sizes


def _largest_block(width: int, most: int) -> int:
    """Return the largest multiple of LANES up to `most` that divides a width."""
    return max(n for n in range(LANES, most + 1, LANES) if width % n == 0)


def _window(
    first: Int[Array, "matrices"], pool: Array, sizes: _MergeSizes
) -> tuple[Int[Array, "matrices"], Int[Array, "matrices"]]:
    """Return where each matrix's window begins, within the pool, and its own rows in that."""
    start = jnp.clip(first // ALIGN * ALIGN, 0, pool.shape[0] - sizes.window)
    return start, first - start


def _merge_kernel(
    a_start_ref,
    a_shift_ref,
    b_start_ref,
    b_shift_ref,
    rank_ref,
    scaling_ref,
    w_ref,
    a_ref,
    b_ref,
    out_ref,
):
    del a_start_ref, b_start_ref
    m = pl.program_id(0)
    rank = rank_ref[m]

    @pl.when(rank == 0)
    def _():
        out_ref[...] = w_ref[...]

    @pl.when(rank > 0)
    def _():
        a = _own_rows(a_ref, a_shift_ref[m], rank)
        b = _own_rows(b_ref, b_shift_ref[m], rank)
        precision = jax.lax.Precision.HIGHEST if w_ref.dtype == jnp.float32 else None
        product = functools.partial(jax.lax.dot_general, precision=precision)
        delta = product(b, a, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        new = w_ref[...].astype(jnp.float32) + scaling_ref[m] * delta
        out_ref[...] = new.astype(out_ref.dtype)


def _own_rows(window_ref, shift, rank):
    """Return the `rank` rows from row `shift` of a window on, then zeros."""
    size = window_ref.shape[0]
    rows = window_ref[...].astype(jnp.float32)
    rows = pltpu.roll(rows, jnp.where(shift == 0, 0, size - shift), axis=0)
    row = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    return jnp.where(row < rank, rows, jnp.float32(0)).astype(window_ref.dtype)
