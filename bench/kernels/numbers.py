"""Random numbers that cost the device one pass over memory, and that the host knows without a copy.

Row r of an array is a window of one short random vector; where it begins is a hash of r. So arrays
of tens of gigabytes are there at once, and any of their rows can be checked in float64.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

LENGTH = 1 << 22


@dataclasses.dataclass(frozen=True)
class Numbers:
    """One array's numbers: normal, times a power of two so that no rounding hides anything."""

    shape: tuple[int, ...]
    seed: int = 0
    scale: float = 1.0

    @property
    def factor(self) -> np.ndarray:
        """The power of two next to `scale`."""
        return np.asarray(2.0 ** round(math.log2(self.scale)), ml_dtypes.bfloat16)

    def on_device(self) -> jax.Array:
        """Return the array, in bfloat16."""
        seed, factor = np.uint32(self.seed), jnp.asarray(self.factor)
        return _windows(jnp.asarray(_vector()), seed, factor, self.shape)

    def rows(self, indices: np.ndarray | list[int]) -> np.ndarray:
        """Return some rows in float64, counted over all axes but the last."""
        width, vector = self.shape[-1], _vector()
        begins = _begins(np.asarray(indices, np.uint32), np.uint32(self.seed), width)
        windows = np.stack([vector[begin : begin + width] for begin in begins])
        return (windows * self.factor).astype(np.float64)


def random(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Return normal bfloat16 numbers times about `scale`, made on the device."""
    return Numbers(shape, seed, scale).on_device()


@functools.cache
def _vector() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(LENGTH, np.float32).astype(ml_dtypes.bfloat16)


def _begins(rows, seed, width: int):
    """Return where the windows of rows begin, u32 numbers that wrap around."""
    mixed = (rows + seed * np.uint32(40503)) * np.uint32(2654435761)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
    return (mixed ^ (mixed >> np.uint32(13))) % np.uint32(LENGTH - width)


@functools.partial(jax.jit, static_argnums=3)
def _windows(vector: jax.Array, seed, factor, shape: tuple[int, ...]) -> jax.Array:
    width = shape[-1]
    rows = jnp.arange(math.prod(shape[:-1]), dtype=jnp.uint32)
    begins = _begins(rows, seed, width).astype(jnp.int32)
    window = functools.partial(jax.lax.dynamic_slice_in_dim, vector, slice_size=width)
    return (jax.vmap(window)(begins) * factor).reshape(shape)
