"""Dense maps of a batch of bfloat16 rows, by csrc/dense_matmul/dense_rows.cuh.

It streams weights through tiles so narrow that every SM has one. Mosaic's kernel, whose tiles have
at least 64 columns, leaves half of the SMs idle at a width of 4096; docs/benchmarks/kernels.md has
both kernels' times. The order of sums is the same: so are the bits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cuda_backend import ffi
from lora_jax.ops import hopper
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.grouped_matmul import QUANTISED
from lora_jax.ops.grouped_matmul.weights import Weight
from lora_jax.typing import Array, Float, Int

MOST_ROWS = 128  # tiles of 64; two share the weights
# Steps of d_in, and of d_out above 64, as Mosaic's kernel takes them. More rows of another width go
# to XLA, which sums in another order.
STEP = 64
MOST_COLUMNS = 48  # of a tile, one of each SM; wider maps employ all SMs by Mosaic's kernel, too
MOST_MAPS = 3


def products(
    x: Float[Array, "rows d_in"],
    weights: tuple[Weight, ...],
    biases: tuple[Float[Array, "1 d_out"] | None, ...],
    addend: Float[Array, "rows d_out"] | None,
    num_rows: Int[Array, "1"],
) -> tuple[Float[Array, "rows _"], ...]:
    """Return the product of each weight [1, d_out, d_in]; rows from `num_rows` on give 0.

    The addend, of x's dtype or float32, is added to the first.
    """
    check_support(x, weights)
    ffi.require()
    none = jnp.zeros((0,), x.dtype)

    def filled(arrays: Sequence[Array | None]) -> list[Array]:
        given = [none if a is None else a for a in arrays]
        return given + [none] * (MOST_MAPS - len(given))

    plain = [w for w in weights if not isinstance(w, QUANTISED)]  # all of them, as was checked
    matrices, widths = [w.reshape(w.shape[1:]) for w in plain], [w.shape[1] for w in plain]
    shapes = [(x.shape[0], width) for width in widths] + [(0,)] * (MOST_MAPS - len(widths))
    results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes]
    call = jax.ffi.ffi_call("lora_jax_cuda_dense_rows", results)
    added = none if addend is None else addend
    found = call(x, num_rows, *filled(matrices), *filled(biases), added)
    return tuple(found[: len(widths)])


def check_support(x: Float[Array, "rows d_in"], weights: tuple[Weight, ...]) -> None:
    """Raise Declined, saying why, for what the kernel does not serve, or is not the faster for."""
    (rows, d_in), widths = x.shape, [w.shape[1] for w in weights]
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
    served = all(w and not w % (STEP if w > STEP else 8) for w in widths)
    if d_in % STEP or d_in == 0 or not served:
        raise Declined(
            f"cuda dense rows takes d_in in steps of {STEP} and d_out in steps of 8, above {STEP} "
            f"in steps of {STEP}, not {d_in} and {listed}"
        )
    tiles = sum(2 * -(-width // (2 * MOST_COLUMNS)) for width in widths)
    if not 1 <= tiles <= hopper.NUM_SMS:
        raise Declined(
            f"cuda dense rows takes up to {hopper.NUM_SMS} tiles of {MOST_COLUMNS} columns, not "
            f"{tiles} of {listed}"
        )
