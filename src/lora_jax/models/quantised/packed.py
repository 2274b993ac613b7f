"""compressed-tensors' packed 4-bit matrices: int4 (pack-quantized) and MXFP4.

int4: `X.weight_packed` int32 [d_out, d_in / 8] holds value + 8 from the low bits up, `weight_scale`
[d_out, groups], `weight_shape` [2] and, unless symmetric, `weight_zero_point` int32 [d_out / 8,
groups], packed along d_out, zero + 8 too. MXFP4: `weight_packed` uint8 [d_out, d_in / 2], the
earlier weight in the low half, `weight_scale` uint8 [d_out, d_in / 32], the exponent plus 127.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lora_jax.models import mxfp4
from lora_jax.models.checkpoint import CheckpointTensor
from lora_jax.models.quantised.forms import (
    BFLOAT16,
    E2M1,
    SIGNED,
    UINT8,
    UNSIGNED,
    AbstractQuantisedTensor,
    CodedForm,
    expect,
    expect_scales,
    finite,
    scale_dtype,
)

INT32 = np.dtype(np.int32)
ZEROS = "weight_zero_point"
PARTS = ("weight_packed", "weight_scale", "weight_shape", ZEROS, "weight_g_idx")
UNUSED = ("input_scale",)
_MIDDLE = 8  # zero point of symmetric codes


@dataclasses.dataclass(frozen=True, eq=False)
class PackedInt4(AbstractQuantisedTensor):
    """One matrix in int4, symmetric if `zeros` is None."""

    codes: CheckpointTensor  # uint8 [d_out, d_in / 2]
    scales: CheckpointTensor  # [d_out, groups]
    zeros: np.ndarray | None  # uint8 [d_out, groups]

    @property
    def form(self) -> CodedForm:
        size = self.shape[1] // self.scales.shape[1]
        table = SIGNED if self.zeros is None else UNSIGNED
        return CodedForm(table, size, scale_dtype(self.scales.dtype), self.zeros is not None)

    def rows_of(self, part: str, rows: range) -> np.ndarray:
        if part == "zeros" and self.zeros is not None:
            return self.zeros[np.array(rows)]
        if part == "scales":
            scales = finite(self.scales.rows(rows), self.scales.name, self.form.largest)
            return scales.astype(scale_dtype(self.scales.dtype))
        return self.codes.rows(rows)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedMxfp4(AbstractQuantisedTensor):
    """One matrix in MXFP4."""

    codes: CheckpointTensor
    exponents: CheckpointTensor

    @property
    def form(self) -> CodedForm:
        return CodedForm(E2M1, mxfp4.BLOCK, BFLOAT16)

    def rows_of(self, part: str, rows: range) -> np.ndarray:
        if part == "codes":
            return self.codes.rows(rows)
        exponents = self.exponents
        return mxfp4.powers_of_two(exponents.rows(rows), exponents.name).astype(BFLOAT16)


def names_of(site: str, tensors: Mapping[str, CheckpointTensor]) -> tuple[str, ...]:
    """Return the tensors of the map X. that belong together."""
    return tuple(n for part in (*PARTS, *UNUSED) if (n := f"{site}{part}") in tensors)


def read_int4(
    site: str,
    tensors: Mapping[str, CheckpointTensor],
    dtype: np.dtype,
    group_size: int | None,
    symmetric: bool,
) -> PackedInt4:
    """Return the matrix X.weight of the map `site` ("X.").

    Raises:
        ValueError: a part is missing, of another shape or dtype, or ordered by activations; a
            symmetric matrix has zero points.
    """
    name = f"{site}weight"
    if f"{site}weight_g_idx" in tensors:
        raise ValueError(
            f"{site}weight_g_idx: groups in the order of activations (actorder) are not supported."
        )
    packed, scales, shape = parts_of(site, PARTS[:3], tensors)
    d_out, d_in = _shape(shape)
    groups = _groups(name, d_in, group_size)
    expect(packed, INT32, (d_out, d_in // 8))
    expect_scales(scales, (d_out, groups))
    zeros = None
    if not symmetric or f"{site}{ZEROS}" in tensors:
        (stored,) = parts_of(site, (ZEROS,), tensors)
        expect(stored, INT32, (-(-d_out // 8), groups))
        # Eight rows of one group in a number: codes of the transposed matrix [groups, d_out].
        zeros = nibbles(stored.whole().T)[:, :d_out].T
    if symmetric and zeros is not None:
        check_symmetric(f"{site}{ZEROS}", zeros)
        zeros = None
    codes = packed.seen_as(UINT8, (d_out, d_in // 2))
    return PackedInt4(name, (d_out, d_in), dtype, codes, scales, zeros)


def read_mxfp4(site: str, tensors: Mapping[str, CheckpointTensor], dtype: np.dtype) -> PackedMxfp4:
    """Return the matrix X.weight of the map `site`; ValueError as `read_int4`."""
    packed, scales = parts_of(site, PARTS[:2], tensors)
    d_out, half = packed.shape if len(packed.shape) == 2 else (0, 0)
    expect(packed, UINT8, (d_out, half))
    groups = _groups(f"{site}weight", 2 * half, mxfp4.BLOCK)
    expect(scales, UINT8, (d_out, groups))
    return PackedMxfp4(f"{site}weight", (d_out, 2 * half), dtype, packed, scales)


def nibbles(numbers: np.ndarray) -> np.ndarray:
    """Return uint8 [rows, 8 * columns]: the eight codes of each int32, from the low bits up."""
    rows = np.ascontiguousarray(numbers).astype("<i4", copy=False).view(np.uint8)
    rows = rows.reshape(len(numbers), -1)
    return np.stack([rows & 15, rows >> 4], axis=-1).reshape(len(rows), -1)


def parts_of(
    site: str, parts: Sequence[str], tensors: Mapping[str, CheckpointTensor]
) -> list[CheckpointTensor]:
    """Return the parts of the map `site` ("X."); ValueError naming those that are missing."""
    missing = [part for part in parts if f"{site}{part}" not in tensors]
    if missing:
        raise ValueError(f"{site}weight is packed and lacks {', '.join(missing)}.")
    return [tensors[f"{site}{part}"] for part in parts]


def check_symmetric(name: str, zeros: np.ndarray) -> None:
    """Raise ValueError if zero points, uint8, are others than those of a symmetric matrix."""
    if np.any(zeros != _MIDDLE):
        raise ValueError(
            f"{name}: a symmetric matrix has zero points other than {_MIDDLE}. Its config must say "
            "that the format is not symmetric."
        )


def _shape(stored: CheckpointTensor) -> tuple[int, int]:
    if stored.shape != (2,) or stored.dtype.kind != "i":
        raise ValueError(f"{stored.name} is {stored.dtype} {stored.shape}, not two integers.")
    d_out, d_in = stored.whole().tolist()
    if min(d_out, d_in) < 1:
        raise ValueError(f"{stored.name} is {[d_out, d_in]}, not two positive sizes.")
    return d_out, d_in


def _groups(name: str, d_in: int, group_size: int | None) -> int:
    size = group_size or d_in
    if not d_in or d_in % size or d_in % 8:
        raise ValueError(f"{name}: {d_in} columns do not divide into groups of {size}.")
    return d_in // size
