"""FP8 matrices: e4m3 values, and scales by block, row or matrix.

`X.weight` F8_E4M3 [d_out, d_in] with `X.weight_scale_inv` or `X.weight_scale`, both of which are
multiplied: [ceil(d_out / rows), ceil(d_in / columns)] by block, [d_out, 1] by row, one number by
matrix. `input_scale` is not used: activations stay in the model's dtype.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lora_jax.models.checkpoint import CheckpointTensor
from lora_jax.models.quantised.forms import (
    FLOAT8,
    AbstractQuantisedTensor,
    ScaledForm,
    expect_scales,
    finite,
)

SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale",)
NAN = 127  # and 255


@dataclasses.dataclass(frozen=True, eq=False)
class Fp8Tensor(AbstractQuantisedTensor):
    """One matrix in FP8; `scales` [rows of blocks, columns of blocks] are few and read at once."""

    values: CheckpointTensor
    scales: np.ndarray
    block: tuple[int, int]

    @property
    def form(self) -> ScaledForm:
        return ScaledForm(self.block[1])

    def rows_of(self, part: str, rows: range) -> np.ndarray:
        if part == "scales":
            return self.scales[np.array(rows) // self.block[0]]
        values = self.values.rows(rows)
        if np.any((values.view(np.uint8) & 127) == NAN):
            raise ValueError(f"{self.name} holds NaN.")
        return values


def names_of(name: str, tensors: Mapping[str, CheckpointTensor]) -> tuple[str, ...]:
    """Return the tensors beside X.weight that belong to it; none if it is not quantised."""
    if tensors[name].dtype != FLOAT8:
        return ()
    site = name.removesuffix("weight")
    return tuple(n for part in (*SCALES, *UNUSED) if (n := site + part) in tensors)


def read(
    name: str,
    tensors: Mapping[str, CheckpointTensor],
    dtype: np.dtype,
    block: tuple[int, int] | None,
) -> Fp8Tensor:
    """Return the matrix X.weight, in blocks of `block` where the config names them.

    Raises:
        ValueError: scales are missing, twice there, not finite or of another shape.
    """
    stored, site = tensors[name], name.removesuffix("weight")
    stored_scales = [tensors[site + part] for part in SCALES if site + part in tensors]
    if len(stored_scales) != 1 or len(stored.shape) != 2:
        raise ValueError(
            f"{name} is F8_E4M3 {stored.shape} with {len(stored_scales)} scales; it needs two axes "
            f"and one of {' or '.join(SCALES)}."
        )
    d_out, d_in = stored.shape
    rows, columns = _block_of(stored_scales[0], stored, block)
    shape = (-(-d_out // rows), -(-d_in // columns))
    scales = finite(stored_scales[0].whole(), stored_scales[0].name)
    scales = scales.astype(np.float32).reshape(shape)
    return Fp8Tensor(name, (d_out, d_in), dtype, stored, scales, (rows, columns))


def _block_of(
    scales: CheckpointTensor, stored: CheckpointTensor, block: tuple[int, int] | None
) -> tuple[int, int]:
    """Return rows and columns that share a scale, which follow from the scales' shape."""
    d_out, d_in = stored.shape
    known: dict[tuple[int, ...], tuple[int, int]] = {
        (): (d_out, d_in),
        (1,): (d_out, d_in),
        (d_out, 1): (1, d_in),
        (d_out,): (1, d_in),
    }
    if block is not None:
        known = {(-(-d_out // block[0]), -(-d_in // block[1])): block}
    if scales.shape not in known:
        want = " or ".join(str(shape) for shape in known)
        described = "no blocks" if block is None else f"blocks of {block[0]} x {block[1]}"
        raise ValueError(
            f"{scales.name} is {scales.dtype} {scales.shape}; {stored.name} {stored.shape} with "
            f"{described} needs floats {want}."
        )
    expect_scales(scales, scales.shape)
    return known[scales.shape]
