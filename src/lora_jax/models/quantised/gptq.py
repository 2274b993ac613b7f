"""GPTQ's and AWQ's int4 matrices, which are transposed and packed again as they are read.

GPTQ: `qweight` int32 [d_in / 8, d_out], eight neighbours of a column from the low bits up, `scales`
[groups, d_out], `qzeros` int32 [groups, d_out / 8] (its first format stores zero - 1) and `g_idx`,
the group of each row of qweight's codes. AWQ: `qweight` int32 [d_in, d_out / 8], `qzeros` [groups,
d_out / 8]: columns 0 2 4 6 1 3 5 7 of eight from the low bits up.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lora_jax.models.checkpoint import CheckpointTensor
from lora_jax.models.quantised.forms import (
    FLOAT32,
    SIGNED,
    UNSIGNED,
    AbstractQuantisedTensor,
    CodedForm,
    expect,
    expect_scales,
    finite,
    pack,
)
from lora_jax.models.quantised.packed import INT32, check_symmetric, nibbles, parts_of

PARTS = ("qweight", "scales", "qzeros", "g_idx")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each code of a number


@dataclasses.dataclass(frozen=True, eq=False)
class GptqTensor(AbstractQuantisedTensor):
    """One matrix of GPTQ or AWQ; without `zeros` it is symmetric."""

    qweight: CheckpointTensor
    scales: CheckpointTensor  # [groups, d_out]
    zeros: np.ndarray | None  # uint8 [d_out, groups]
    awq: bool

    @property
    def form(self) -> CodedForm:
        size = self.shape[1] // self.scales.shape[0]
        table = SIGNED if self.zeros is None else UNSIGNED
        return CodedForm(table, size, FLOAT32, self.zeros is not None)

    def rows_of(self, part: str, rows: range) -> np.ndarray:
        index = np.array(rows)
        if part == "zeros" and self.zeros is not None:
            return self.zeros[index]
        if part == "scales":
            scales = finite(self.scales.whole(), self.scales.name, self.form.largest)
            return scales.T[index].astype(np.float32)
        if self.awq:
            return pack(in_order(nibbles(self.qweight.whole())).T[index])
        return pack(nibbles(self.qweight.whole().T[index]))


def names_of(site: str, tensors: Mapping[str, CheckpointTensor]) -> tuple[str, ...]:
    """Return the tensors of the map X. that belong together."""
    return tuple(n for part in PARTS if (n := f"{site}{part}") in tensors)


def in_order(codes: np.ndarray) -> np.ndarray:
    """Return AWQ's codes [rows, columns] with every eight columns in order."""
    eights = codes.reshape(len(codes), -1, 8)
    return eights[:, :, np.argsort(AWQ_ORDER)].reshape(codes.shape)


def read(
    site: str,
    tensors: Mapping[str, CheckpointTensor],
    dtype: np.dtype,
    group_size: int | None,
    symmetric: bool,
    zero_offset: int,
    *,
    awq: bool,
    desc_act: bool = False,
) -> GptqTensor:
    """Return the matrix X.weight of the map `site` ("X.").

    Raises:
        ValueError: a part is missing, of another shape, ordered by activations, or a zero point is
            not what the config says.
    """
    qweight, scales, qzeros = parts_of(site, PARTS[:3], tensors)
    rows, columns = qweight.shape if len(qweight.shape) == 2 else (0, 0)
    d_in, d_out = (rows, 8 * columns) if awq else (8 * rows, columns)
    size = group_size or d_in
    if not d_in or not d_out or d_in % size or d_in % 8 or d_out % 8:
        raise ValueError(
            f"{qweight.name} {qweight.shape}: {d_out} rows of {d_in} weights do not divide into "
            f"eights and groups of {size}."
        )
    groups = d_in // size
    expect(qweight, INT32, (rows, columns))
    expect_scales(scales, (groups, d_out))
    expect(qzeros, INT32, (groups, d_out // 8))
    _check_order(site, tensors, d_in, size, desc_act)
    zero_points = _zeros(qzeros, symmetric, zero_offset, awq)
    zeros = None if symmetric else zero_points
    return GptqTensor(f"{site}weight", (d_out, d_in), dtype, qweight, scales, zeros, awq)


def _check_order(
    site: str, tensors: Mapping[str, CheckpointTensor], d_in: int, size: int, desc_act: bool
) -> None:
    """Refuse groups that are not runs of neighbours."""
    stored = tensors.get(f"{site}g_idx")
    if stored is None and desc_act and size < d_in:
        raise ValueError(
            f"{site}qweight: quantization_config says desc_act, and without {site}g_idx the group "
            "of a column is not known."
        )
    if stored is None:
        return
    if stored.shape != (d_in,) or not np.array_equal(stored.whole(), np.arange(d_in) // size):
        raise ValueError(
            f"{stored.name}: groups in the order of activations (desc_act) are not supported."
        )


def _zeros(qzeros: CheckpointTensor, symmetric: bool, offset: int, awq: bool) -> np.ndarray:
    """Return the zero points, uint8 [d_out, groups]."""
    stored = nibbles(qzeros.whole())
    zeros = (in_order(stored) if awq else stored).T + np.uint8(offset)
    if symmetric:
        check_symmetric(qzeros.name, zeros)
    if np.any(zeros > 15):
        raise ValueError(
            f"{qzeros.name} holds {16 - offset}: libraries disagree whether that zero point is 16 "
            "or 0. Write the checkpoint in GPTQ's second format (gptq_v2)."
        )
    return zeros
