"""Dense maps of a batch of bfloat16 rows, by csrc/dense_matmul/dense_rows.cuh.

It streams weights through tiles so narrow that every SM has one. Mosaic's kernel, whose tiles have
at least 64 columns, leaves half of the SMs idle at a width of 4096: 64 rows of Llama-3.1-8B's down
map took 41 us there on an H200, 32 us here. The order of sums is the same: so are the bits.
"""

import jax
import jax.numpy as jnp

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul import QUANTISED
from lora_jax.ops.grouped_matmul.weights import Weight
from lora_jax.typing import Array, Float, Int

MOST_ROWS = 128  # 64 of each of two warpgroups
STEP = 64  # of d_in, and of d_out above it, as Mosaic's: of others more rows would have other bits
COLUMNS = (16, 32, 48, 64, 80, 96, 112)  # of a tile, of each map in it
SMS = 132  # of an H100 or H200; each has one tile at most
MOST_MAPS = 3

Addend = Float[Array, "rows d_out"] | None


def products(
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, ...],
    biases: tuple[Float[Array, "1 d_out"] | None, ...],
    addends: tuple[Addend, ...],
    num_rows: Int[Array, "1"],
) -> tuple[Float[Array, "rows _"], ...]:
    """Return the product of each weight [1, d_out, d_in]; rows from `num_rows` on give 0."""
    widths = [w.shape[1] for w in weights]
    check_support(x, weights, widths)
    return _call(x, weights, biases, addends, num_rows, widths, gated=False)


def gated_product(
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, Weight],
    addends: tuple[Addend, Addend],
    num_rows: Int[Array, "1"],
) -> Float[Array, "rows d_out"]:
    """Return silu of the first weight's product times the second's."""
    width = weights[0].shape[1]
    check_support(x, weights, [width])
    if len({addend is None for addend in addends}) > 1:
        raise Declined("cuda gated_matmul takes both addends or none")
    return _call(x, weights, (None, None), addends, num_rows, [width], gated=True)[0]


def check_support(x: Array, weights: tuple[Weight, ...], widths: list[int]) -> None:
    """Raise Declined, saying why, for what the kernel does not serve; `widths` have tiles."""
    rows, d_in = x.shape
    for w in weights:
        if isinstance(w, QUANTISED) or w.dtype != jnp.bfloat16:
            raise Declined(
                f"cuda dense rows takes plain weights in bfloat16, not {type(w).__name__} of "
                f"{w.dtype}"
            )
        if w.shape[0] != 1:
            raise Declined(f"cuda dense rows takes one group, not {w.shape[0]}")
    if len(weights) > MOST_MAPS:
        raise Declined(f"cuda joined_matmul takes up to {MOST_MAPS} maps, not {len(weights)}")
    if not 1 <= rows <= MOST_ROWS:
        raise Declined(f"cuda dense rows takes 1 to {MOST_ROWS} rows, not {rows}")
    listed = ", ".join(map(str, widths))
    if d_in % STEP or d_in == 0 or any(w % 8 or (w > STEP and w % STEP) for w in widths):
        raise Declined(
            f"cuda dense rows takes d_in in steps of {STEP} and d_out in steps of 8, above {STEP} "
            f"of that, not {d_in} and {listed}"
        )
    tiles = sum(-(-width // COLUMNS[-1]) for width in widths)
    if not 1 <= tiles <= SMS:
        raise Declined(
            f"cuda dense rows takes up to {SMS} tiles of {COLUMNS[-1]} columns, not {tiles} of "
            f"{listed}"
        )


def _call(
    x: Array,
    weights: tuple[Array, ...],
    biases: tuple[Array | None, ...],
    addends: tuple[Array | None, ...],
    num_rows: Array,
    widths: list[int],
    *,
    gated: bool,
) -> tuple[Array, ...]:
    """Return the kernel's results, one of each width."""
    ffi.require()
    none = jnp.zeros((0,), x.dtype)

    def filled(arrays: tuple[Array | None, ...], count: int = MOST_MAPS) -> list[Array]:
        given = [none if a is None else a for a in arrays[:count]]
        return given + [none] * (count - len(given))

    matrices = tuple(w.reshape(w.shape[1:]) for w in weights)
    shapes = [(x.shape[0], width) for width in widths] + [(0,)] * (MOST_MAPS - len(widths))
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    call = jax.ffi.ffi_call("lora_jax_cuda_dense_rows", results)
    found = call(x, num_rows, *filled(matrices), *filled(biases), *filled(addends, 2), gated=gated)
    return tuple(found[: len(widths)])
