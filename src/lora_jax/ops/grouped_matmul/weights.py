"""Quantised weights: pytrees that `grouped_matmul` takes in the place of a plain array.

Both stand for an array [..., d_out, d_in] of `dtype`, which `plain` makes: a product with one is
the product with that array, bit for bit. Values are computed in float32 and rounded once to
`dtype`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.typing import Array, Float, UInt8

_BFLOAT16 = {"exponent_bits": 8, "mantissa_bits": 7}
_SCALES = (jnp.float32, jnp.bfloat16)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ROWS, FRAGMENTS, LANES, QUADS = "rows", "fragments", "lanes", "quads"  # orders of codes
FRAGMENT = 32  # codes of a row that FRAGMENTS and LANES reorder among themselves
QUAD = 128  # codes of a row that QUADS reorders among themselves
_WHOLE = {ROWS: 2, FRAGMENTS: FRAGMENT, LANES: FRAGMENT, QUADS: QUAD}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodedWeight:
    """Four bits a weight: w[n, k] = (table[code[n, k]] - zeros[n, g]) * scales[n, g].

    g = k // group_size; a group is d_in / groups weights of one row. Leading axes are those of the
    array it stands for. In the order of ROWS code 2j of a row is the low half of its byte j, code
    2j + 1 the high half. FRAGMENTS is what tensor cores want: of each 32 codes, word t of four has
    the codes of columns 8q + 2t + h, q < 4 and h < 2, in its bits from 16h + 4q on. LANES is what
    byte shuffles of CPUs want: of each 32 codes, byte 8p + i has that of column 16p + i in its low
    half and that of column 16p + 8 + i in its high half, p < 2 and i < 8. QUADS is what word
    look-ups of AVX-512 want: of each 128 codes, 16-bit word i of 32 has that of column 32q + i in
    its bits from 4q on, q < 4. Without `zeros` nothing is subtracted; with them `table` holds
    integers, so that the difference is exact. Zeros are at most 15, which readers of checkpoints
    see to and `check` does not, as it is called at every use and sees no values.
    """

    codes: Any  # uint8 [*lead, d_out, d_in / 2]
    scales: Any  # float32 or bfloat16 [*lead, d_out, groups]
    zeros: Any  # uint8 [*lead, d_out, groups], or None
    table: tuple[float, ...] = dataclasses.field(metadata={"static": True})  # of 16 float32 values
    dtype: Any = dataclasses.field(metadata={"static": True})
    order: str = dataclasses.field(default=ROWS, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def ndim(self) -> int:
        """Axes of the matrix or stack that it stands for."""
        return self.codes.ndim

    @property
    def group_size(self) -> int:
        """Neighbouring weights of a row that share a scale."""
        return self.shape[-1] // self.scales.shape[-1]

    def __getitem__(self, index: Any) -> "CodedWeight":
        """Return the weight at an index of the leading axes; ... is all of it, None a new axis."""
        zeros = None if self.zeros is None else self.zeros[index]
        changed = {"codes": self.codes[index], "scales": self.scales[index], "zeros": zeros}
        return dataclasses.replace(self, **changed)

    def check(self, name: str) -> None:
        """Raise ValueError naming the part that does not fit the others."""
        groups = self.scales.shape[-1]
        want = (*self.shape[:-1], groups)
        for part in ("scales", "zeros"):
            array = getattr(self, part)
            if array is not None and tuple(array.shape) != want:
                raise ValueError(f"{name}: {part} {array.shape} do not fit codes, want {want}")
        if self.zeros is not None and self.zeros.dtype != jnp.uint8:
            raise ValueError(f"{name}: want uint8 zeros of 0 to 15, got {self.zeros.dtype}")
        if not groups or self.shape[-1] % groups or self.group_size % 2:
            raise ValueError(f"{name}: {groups} groups do not divide d_in {self.shape[-1]}")
        if self.order not in _WHOLE or self.shape[-1] % _WHOLE[self.order]:
            raise ValueError(
                f"{name}: order {self.order} of {self.shape[-1]} codes, want {ROWS}, "
                f"{FRAGMENTS} or {LANES} of a multiple of {FRAGMENT}, or {QUADS} of one of {QUAD}"
            )
        if (
            len(self.table) != 16
            or self.codes.dtype != jnp.uint8
            or self.scales.dtype not in _SCALES
        ):
            raise ValueError(
                f"{name}: want 16 table values, uint8 codes and float32 or bfloat16 scales, got "
                f"{len(self.table)}, {self.codes.dtype} and {self.scales.dtype}"
            )

    def plain(self) -> Float[Array, "*lead d_out d_in"]:
        """Return the array that this stands for."""
        codes = unpacked(self.codes, self.order).astype(jnp.int32)
        values = jnp.take(jnp.asarray(self.table, jnp.float32), codes)
        by_group = values.reshape(*self.scales.shape, self.group_size)
        if self.zeros is not None:
            by_group = by_group - self.zeros.astype(jnp.float32)[..., None]
        by_group = by_group * self.scales.astype(jnp.float32)[..., None]
        return _rounded(by_group.reshape(self.shape), self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledWeight:
    """Eight bits a weight: w[n, k] = values[n, k] * scales[n // block[0], k // block[1]]."""

    values: Any  # float8_e4m3fn [*lead, d_out, d_in]
    scales: Any  # float32 [*lead, ceil(d_out / block[0]), ceil(d_in / block[1])]
    block: tuple[int, int] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """Axes of the matrix or stack that it stands for."""
        return self.values.ndim

    def __getitem__(self, index: Any) -> "ScaledWeight":
        """Return the weight at an index of the leading axes; ... is all of it, None a new axis."""
        return dataclasses.replace(self, values=self.values[index], scales=self.scales[index])

    def check(self, name: str) -> None:
        """Raise ValueError naming the part that does not fit the others."""
        *lead, d_out, d_in = self.shape
        want = (*lead, -(-d_out // self.block[0]), -(-d_in // self.block[1]))
        if tuple(self.scales.shape) != want:
            raise ValueError(
                f"{name}: scales {self.scales.shape} do not fit blocks {self.block}, want {want}"
            )
        if self.values.dtype != jnp.float8_e4m3fn or self.scales.dtype != jnp.float32:
            raise ValueError(
                f"{name}: want float8_e4m3fn values and float32 scales, got {self.values.dtype} "
                f"and {self.scales.dtype}"
            )

    def plain(self) -> Float[Array, "*lead d_out d_in"]:
        """Return the array that this stands for."""
        d_out, d_in = self.shape[-2:]
        scales = jnp.repeat(self.scales, self.block[0], axis=-2)[..., :d_out, :]
        scales = jnp.repeat(scales, self.block[1], axis=-1)[..., :d_in]
        return _rounded(self.values.astype(jnp.float32) * scales, self.dtype)


QUANTISED = (CodedWeight, ScaledWeight)
Weight = Float[Array, "groups d_out d_in"] | CodedWeight | ScaledWeight
Matrix = Float[Array, "d_out d_in"] | CodedWeight | ScaledWeight
# Of maps of one x, each of a width of its own.
Matrices = Sequence[Float[Array, "_ d_in"] | CodedWeight | ScaledWeight]


def unpacked(codes: UInt8[Array, "*lead bytes"], order: str) -> UInt8[Array, "*lead d_in"]:
    """Return the codes of rows, a byte each, in the order of columns."""
    halves = jnp.stack([codes & 15, codes >> 4], axis=-1)
    if order == FRAGMENTS:  # [..., t, h, q] to [..., q, t, h]
        halves = jnp.moveaxis(halves.reshape(*codes.shape[:-1], -1, 4, 2, 4), -1, -3)
    if order == LANES:  # [..., i, h] to [..., h, i]
        halves = jnp.swapaxes(halves.reshape(*codes.shape[:-1], -1, 8, 2), -1, -2)
    if order == QUADS:  # [..., i, q] to [..., q, i]
        halves = jnp.swapaxes(halves.reshape(*codes.shape[:-1], -1, 32, 4), -1, -2)
    return halves.reshape(*codes.shape[:-1], -1)


def in_fragments(codes: UInt8[Array, "*lead bytes"]) -> UInt8[Array, "*lead bytes"]:
    """Return codes in the order of ROWS in that of FRAGMENTS; 16 divides `bytes`."""
    by_column = unpacked(codes, ROWS).reshape(*codes.shape[:-1], -1, 4, 4, 2)
    pairs = jnp.moveaxis(by_column, -3, -1).reshape(*codes.shape, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def in_lanes(codes: UInt8[Array, "*lead bytes"]) -> UInt8[Array, "*lead bytes"]:
    """Return codes in the order of ROWS in that of LANES; 16 divides `bytes`."""
    halves = unpacked(codes, ROWS).reshape(*codes.shape[:-1], -1, 2, 8)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(codes.shape)


def in_quads(codes: UInt8[Array, "*lead bytes"]) -> UInt8[Array, "*lead bytes"]:
    """Return codes in the order of ROWS in that of QUADS; 64 divides `bytes`."""
    by_column = unpacked(codes, ROWS).reshape(*codes.shape[:-1], -1, 4, 32)
    pairs = jnp.swapaxes(by_column, -1, -2).reshape(*codes.shape, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def first_integer(table: tuple[float, ...]) -> int | None:
    """Return the value of code 0 if codes count integers up from it: -16 to 0, and exact."""
    first = table[0]
    counted = all(value == first + i for i, value in enumerate(table))
    return int(first) if counted and first == int(first) and -16 <= first <= 0 else None


def is_e2m1(table: tuple[float, ...]) -> bool:
    """Return whether codes are floats of one sign, two exponent and one mantissa bit."""
    return table == (*_E2M1, *(-v for v in _E2M1))


def plain(w: Any) -> Float[Array, "*lead d_out d_in"]:
    """Return the array that a weight stands for: itself if it is one.

    The barrier keeps XLA from computing it inside a product, whose sums might then run in another
    order than those of a product with the array.
    """
    return jax.lax.optimization_barrier(w.plain()) if isinstance(w, QUANTISED) else w


def _rounded(values: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Return float32 values in `dtype`; XLA may drop a rounding that is only a conversion."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        values = jax.lax.reduce_precision(values, **_BFLOAT16)
    return values.astype(dtype)
