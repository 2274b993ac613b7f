"""FP8 matrices: e4m3 values, and scales by block, row or matrix.

`X.weight` F8_E4M3 [d_out, d_in] with `X.weight_scale_inv` or `X.weight_scale`, both of which are
multiplied: [ceil(d_out / rows), ceil(d_in / columns)] by block, [d_out, 1] by row, one number by
matrix. All experts of a layer may be one tensor `X` [experts, rows, columns] with `X_scale_inv`.
Scales of activations are not used: activations stay in the model's dtype.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lora_jax.models.checkpoint import CheckpointTensor, Index
from lora_jax.models.quantised.forms import (
    FLOAT8,
    AbstractQuantisedTensor,
    ScaledForm,
    expect_scales,
    finite,
)

WEIGHT = "weight"
SCALES = ("_scale_inv", "_scale")  # behind the name of the values
UNUSED = ("input_scale", "activation_scale")  # beside it
NAN = 127  # and 255
LARGEST = 448.0  # value


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Tensor(AbstractQuantisedTensor):
    """One matrix in FP8; `scales` [rows of blocks, columns of blocks] are few and read at once."""

    values: CheckpointTensor  # [d_in, d_out] if turned
    scales: np.ndarray
    block: tuple[int, int]
    is_turned: bool = False

    @property
    def form(self) -> ScaledForm:
        return ScaledForm(self.block[1])

    def turned(self) -> "Fp8Tensor":
        """Return the transposed matrix; `rows_of` then reads all values for some rows."""
        changed = {"shape": self.shape[::-1], "scales": self.scales.T, "block": self.block[::-1]}
        return dataclasses.replace(self, **changed, is_turned=not self.is_turned)

    def rows_of(self, part: str, rows: range) -> np.ndarray:
        if part == "scales":
            return self.scales[np.array(rows) // self.block[0]]
        values = self.values.whole().T[np.array(rows)] if self.is_turned else self.values.rows(rows)
        if np.any((values.view(np.uint8) & 127) == NAN):
            raise ValueError(f"{self.name} holds NaN.")
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Stack:
    """Matrices of one tensor [count, d_out, d_in], each with its own scales."""

    name: str
    members: tuple[Fp8Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.members), *self.members[0].shape)

    @property
    def dtype(self) -> np.dtype:
        return self.members[0].dtype

    @property
    def form(self) -> ScaledForm:
        return self.members[0].form

    def turned(self) -> "Fp8Stack":
        """Return the transposed matrices."""
        return Fp8Stack(self.name, tuple(member.turned() for member in self.members))

    def read(self, index: Index, out: np.ndarray) -> None:
        """Fill `out` with plain values, rounded to the model's dtype and then to out's."""
        for position, place in enumerate(index[0]):
            self.members[place].read(index[1:], out[position])

    def read_part(self, part: str, index: Index, out: np.ndarray) -> None:
        """Fill `out` with an index of one part of the form."""
        for position, place in enumerate(index[0]):
            self.members[place].read_part(part, index[1:], out[position])


def names_of(name: str, tensors: Mapping[str, CheckpointTensor]) -> tuple[str, ...]:
    """Return the tensors beside e4m3 values that belong to them; none if they are others."""
    if tensors[name].dtype != FLOAT8:
        return ()
    between = name.removesuffix(WEIGHT) if name.endswith(WEIGHT) else f"{name}_"
    beside = (*(name + end for end in SCALES), *(between + part for part in UNUSED))
    return tuple(n for n in beside if n in tensors)


def read(
    name: str,
    tensors: Mapping[str, CheckpointTensor],
    dtype: np.dtype,
    block: tuple[int, int] | None,
) -> Fp8Tensor | Fp8Stack:
    """Return the matrix or matrices of a name, in blocks of `block` where the config names them.

    Raises:
        ValueError: scales are missing, twice there, not finite or of another shape.
    """
    stored = tensors[name]
    found = [tensors[name + end] for end in SCALES if name + end in tensors]
    if len(found) != 1 or len(stored.shape) not in (2, 3) or not all(stored.shape):
        raise ValueError(
            f"{name} is F8_E4M3 {stored.shape} with {len(found)} scales; it needs two axes, or "
            f"three for experts, and one of {' or '.join(name + end for end in SCALES)}."
        )
    *lead, d_out, d_in = stored.shape
    rows, columns = size = _block_of(found[0], stored, block)
    scales = finite(found[0].whole(), found[0].name, LARGEST).astype(np.float32)
    scales = scales.reshape(*lead, -(-d_out // rows), -(-d_in // columns))
    if not lead:
        return Fp8Tensor(name, (d_out, d_in), dtype, stored, scales, size)
    members = (
        Fp8Tensor(name, (d_out, d_in), dtype, stored.member(place), of_one, size)
        for place, of_one in enumerate(scales)
    )
    return Fp8Stack(name, tuple(members))


def _block_of(
    scales: CheckpointTensor, stored: CheckpointTensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Return rows and columns that share a scale, which follow from the scales' shape."""
    *lead, d_out, d_in = stored.shape
    whole = (d_out, d_in)
    known: dict[tuple[int, ...], tuple[int, int]]
    if block is not None:
        known = {(*lead, -(-d_out // block[0]), -(-d_in // block[1])): block}
    elif lead:  # one of each matrix, or one of its first and of its second half: gate and up
        known = {(*lead,): whole, (*lead, 1, 1): whole}
        known |= {} if d_out % 2 else {(*lead, 2, 1): (d_out // 2, d_in)}
    else:
        known = {(): whole, (1,): whole, (d_out, 1): (1, d_in), (d_out,): (1, d_in)}
    if scales.shape not in known:
        want = " or ".join(str(shape) for shape in known)
        described = "no blocks" if block is None else f"blocks of {block[0]} x {block[1]}"
        raise ValueError(
            f"{scales.name} is {scales.dtype} {scales.shape}; {stored.name} {stored.shape} with "
            f"{described} needs floats {want}."
        )
    expect_scales(scales, scales.shape)
    return known[scales.shape]
