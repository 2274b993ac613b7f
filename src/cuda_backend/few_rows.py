"""Products of bfloat16 rows in groups of few, by csrc/grouped_matmul/few_rows.cuh.

Weights are e4m3, of 4 bits, or plain; each is streamed once, and made plain in registers where it
is not. What the kernel does not serve is declined, and Mosaic's is next: so are plain weights of
more than a few rows, which that streams as fast.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul.weights import (
    FRAGMENTS,
    CodedWeight,
    ScaledWeight,
    Weight,
    first_integer,
    is_e2m1,
)
from lora_jax.typing import Array, Float, Int

# Coding of csrc/grouped_matmul/codings.cuh. AFFINE are integers with scales in float32, with zero
# points, or as INTEGER does not have them.
FLOAT8, INTEGER, E2M1, TABLE, PLAIN, AFFINE = range(6)
CODINGS = ("float8", "integers", "E2M1", "a table", "plain", "affine integers")  # names in errors
# Of d_in, that share a scale; multiples too where scales are copied one by one.
SCALE_COLUMNS = {FLOAT8: (128,), INTEGER: (128, 64), E2M1: (32,), TABLE: (64,), AFFINE: (64, 32)}
MULTIPLES = (FLOAT8, TABLE, AFFINE)  # of the first of these, and all of d_in
FIRST_INTEGERS = (0, -1, -2, -4, -8, -16)  # exact in bfloat16 times any scale
MOST_SLOTS = 1 << 20  # units of columns in d_in times those that share a scale
MOST_GROUPS = 1 << 12  # of a row, which the kernel finds by a product of 32 bits
MOST_ROWS = 8  # of a likely group in the mean: few groups have more than a tile
# Of plain weights: rows of a dense map, and of a likely group in the mean. Either product of a
# token's experts of Qwen3-30B took 6 us less in a step than by Mosaic's kernel, whose CTAs each
# walk over all group sizes.
PLAIN_ROWS, PLAIN_MEAN = 8, 1
PLAIN_TILES = 128  # of a dense map: more employ all SMs by Mosaic's kernel, too
PLAIN_GROUPS = 256  # one warp lists them all; Mosaic's looks no further than the last row's
# More rows are Mosaic's, which takes quantised maps in steps of so many columns, and wider plain
# ones. Of other widths more rows would go to XLA, whose order of sums is another one.
STEP_COLUMNS = 64
MOST_WORKS = 1024  # blocks of rows of all groups, whose list is in shared memory
FEWEST_TILE_ROWS, MOST_MATRICES = 8, 3  # of a launch
DENSE_ROWS, DENSE_COLUMNS = 32, 64  # of a tile of one group's matrices
SLOTS = 2 * 132  # CTAs of such tiles on an H100's or H200's SMs


@dataclasses.dataclass(frozen=True)
class Form:
    """Storage form of a weight; gate and up share one."""

    coding: int
    scale_columns: int  # of d_in that share a scale
    first: int = 0  # of INTEGER and AFFINE: the value of code 0
    table: tuple[float, ...] = (0.0,) * 16  # of TABLE
    scales: str = ""  # of AFFINE: their dtype
    zeros: bool = False  # of AFFINE


Addend = Float[Array, "rows d_out"] | None


def products(
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, ...],
    biases: tuple[Float[Array, "groups d_out"] | None, ...],
    addends: tuple[Addend, ...],
    group_sizes: Int[Array, "groups"],
    likely_groups: int | None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return each weight's product; several weights are of one group."""
    widths = [w.shape[1] for w in weights]
    form = _checked(x, weights, widths, likely_groups)
    return _call(form, x, weights, biases, addends, group_sizes, widths, gated=False)


def gated_product(
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, Weight],
    addends: tuple[Addend, Addend],
    group_sizes: Int[Array, "groups"],
    likely_groups: int | None,
) -> Float[Array, "rows d_out"]:
    """Return silu of the first weight's product times the second's."""
    width = weights[0].shape[1]
    form = _checked(x, weights, [width], likely_groups)
    if len({addend is None for addend in addends}) > 1:
        raise Declined("cuda gated_matmul takes both addends or none")
    none = (None, None)
    return _call(form, x, weights, none, addends, group_sizes, [width], gated=True)[0]


def _checked(
    x: Array, weights: tuple[Weight, ...], widths: list[int], likely_groups: int | None
) -> Form:
    """Return the form of some weights, or raise Declined."""
    if len(weights) > MOST_MATRICES:
        raise Declined(f"cuda joined_matmul takes up to {MOST_MATRICES} maps, not {len(weights)}")
    form, (rows, d_in) = form_of(weights), x.shape
    if form.coding == PLAIN:  # gate and up are streamed as two
        widths = [w.shape[1] for w in weights]
    check_support(form, rows, weights[0].shape[0], widths, d_in, likely_groups)
    return form


def _call(
    form: Form,
    x: Array,
    weights: tuple[Weight, ...],
    biases: tuple[Array | None, ...],
    addends: tuple[Array | None, ...],
    group_sizes: Array,
    widths: list[int],
    *,
    gated: bool,
) -> tuple[Array, ...]:
    """Return the kernel's results, one of each width."""
    ffi.require()
    none = jnp.zeros((0,), jnp.bfloat16)
    stored, scales, zeros = zip(*(parts(w) for w in weights), strict=True)

    def filled(arrays: tuple[Array | None, ...], count: int = MOST_MATRICES) -> list[Array]:
        given = [none if a is None else a for a in arrays[:count]]
        return given + [none] * (count - len(given))

    shapes = [(x.shape[0], width) for width in widths] + [(0,)] * (MOST_MATRICES - len(widths))
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    attributes = {"coding": form.coding, "scale_columns": form.scale_columns, "first": form.first}
    found = jax.ffi.ffi_call("lora_jax_cuda_few_rows", results)(
        x,
        group_sizes,
        *filled(stored),
        *filled(scales),
        *filled(zeros),
        *filled(biases),
        *filled(addends, 2),
        gated=gated,
        **{name: np.int32(value) for name, value in attributes.items()},
        table=np.array(form.table, np.float32),
    )
    return tuple(found[: len(widths)])


def parts(w: Weight) -> tuple[Array, Array, Array | None]:
    """Return a weight's array that is streamed, its scales and its zero points."""
    if isinstance(w, CodedWeight):
        return w.codes, w.scales, w.zeros
    if isinstance(w, ScaledWeight):
        return w.values, w.scales, None
    return w, jnp.zeros((0, 0, 0), w.dtype), None


def form_of(weights: tuple[Weight, ...]) -> Form:
    """Return the one form of some weights, or raise Declined for one that is not served."""
    forms = {_form_of(w) for w in weights}
    if len(forms) > 1:
        listed = ", ".join(
            sorted(f"{CODINGS[f.coding]} by {f.scale_columns} weights" for f in forms)
        )
        raise Declined(f"cuda few rows takes weights of one form, not {listed}")
    return forms.pop()


def _form_of(w: Weight) -> Form:
    if isinstance(w, ScaledWeight):
        rows, columns = w.block
        if rows != 1:
            raise Declined(f"cuda grouped_matmul takes scales of one row, not of {w.block}")
        return Form(FLOAT8, min(columns, w.shape[-1]))
    if not isinstance(w, CodedWeight):
        if w.dtype != jnp.bfloat16:
            raise Declined(f"cuda few rows takes plain weights in bfloat16, not {w.dtype}")
        return Form(PLAIN, w.shape[-1])
    if w.order != FRAGMENTS:
        raise Declined(
            f"cuda grouped_matmul takes codes in the order of {FRAGMENTS}, not {w.order}"
        )
    first, narrow = first_integer(w.table), w.scales.dtype == jnp.bfloat16
    if w.zeros is not None and first != 0:
        raise Declined("cuda grouped_matmul takes zero points beside integers from 0 on")
    if first is not None:
        pairs = narrow and w.zeros is None and w.scales.shape[-1] % 2 == 0  # scales are copied so
        if pairs and first in FIRST_INTEGERS and w.group_size in SCALE_COLUMNS[INTEGER]:
            return Form(INTEGER, w.group_size, first)
        scales, zeros = str(w.scales.dtype), w.zeros is not None
        return Form(AFFINE, w.group_size, first, scales=scales, zeros=zeros)
    if narrow and not is_e2m1(w.table):
        raise Declined(
            "cuda grouped_matmul takes bfloat16 scales for E2M1 and integers, float32 scales for "
            "any other table"
        )
    return Form(E2M1, w.group_size) if narrow else Form(TABLE, w.group_size, table=w.table)


def check_support(
    form: Form, rows: int, groups: int, widths: list[int], d_in: int, likely_groups: int | None
) -> None:
    """Raise Declined, saying why, for what the kernel does not serve, or is not the faster for."""
    likely, plain = min(groups, likely_groups or groups), form.coding == PLAIN
    most = (PLAIN_ROWS if groups == 1 else PLAIN_MEAN) if plain else MOST_ROWS
    if groups == 1 and (not plain or rows <= most):
        _check_dense(rows, widths, PLAIN_TILES if plain else SLOTS)
    elif rows < 1 or rows > likely * most:
        raise Declined(
            f"cuda grouped_matmul takes up to {most} rows for each of {likely} groups of "
            f"{CODINGS[form.coding]} weights, not {rows}"
        )
    if plain and groups > PLAIN_GROUPS:
        raise Declined(
            f"cuda grouped_matmul takes up to {PLAIN_GROUPS} groups of plain weights, not {groups}"
        )
    if min(groups, rows) + rows // FEWEST_TILE_ROWS > MOST_WORKS:
        raise Declined(
            f"cuda grouped_matmul takes up to {MOST_WORKS} blocks of {FEWEST_TILE_ROWS} rows, "
            f"not {rows} rows in {groups} groups"
        )
    if d_in % 64 or d_in == 0 or any(width % 8 or width == 0 for width in widths):
        raise Declined(
            f"cuda grouped_matmul takes d_in in steps of 64 and d_out in steps of 8, not {d_in} "
            f"and {', '.join(map(str, widths))}"
        )
    narrow = STEP_COLUMNS if plain else 0
    if any(width > narrow and width % STEP_COLUMNS for width in widths):
        which = f"plain weights above {STEP_COLUMNS}" if plain else "quantised weights"
        raise Declined(
            f"cuda few rows takes d_out of {which} in steps of {STEP_COLUMNS}, as kernels of more "
            f"rows do, not {', '.join(map(str, widths))}"
        )
    _check_scales(form.coding, form.scale_columns, d_in)


def _check_dense(rows: int, widths: list[int], slots: int) -> None:
    """Raise Declined unless all tiles of one group's matrices are on the SMs at a time."""
    tiles = -(-rows // DENSE_ROWS) * sum(-(-width // DENSE_COLUMNS) for width in widths)
    if not 1 <= tiles <= slots:
        raise Declined(
            f"cuda few rows takes tiles of one group's matrices, up to {slots} at a time, not "
            f"{tiles} of {rows} rows by {', '.join(map(str, widths))}"
        )


def _check_scales(coding: int, columns: int, d_in: int) -> None:
    """Raise Declined unless a thread can read the scales, one for so many `columns`."""
    if coding == PLAIN:
        return
    served, unit = SCALE_COLUMNS[coding], SCALE_COLUMNS[coding][0]
    whole = coding in MULTIPLES and (columns % unit == 0 or columns == d_in)
    if columns not in served and not whole:
        allowed = " or ".join(map(str, served)) + " weights"
        allowed += " or multiples" if coding in MULTIPLES else ""
        raise Declined(f"cuda grouped_matmul takes groups of {allowed}, not {columns}")
    long = d_in // unit * (columns // unit) >= MOST_SLOTS or d_in // columns >= MOST_GROUPS
    if columns < d_in and long:
        raise Declined(f"cuda grouped_matmul takes no rows of {d_in} in groups of {columns}")
