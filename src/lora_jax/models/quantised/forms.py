"""Device forms of quantised matrices on the host: parts as numpy arrays, and their meaning."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from lora_jax.models.checkpoint import CheckpointTensor, Index
from lora_jax.ops.grouped_matmul import CodedWeight, ScaledWeight

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)
_SCALES = (  # what files may store scales in
    FLOAT32,
    BFLOAT16,
    np.dtype(np.float16),
    np.dtype(ml_dtypes.float8_e8m0fnu),
)
_LARGEST = float(ml_dtypes.finfo(BFLOAT16).max)  # slightly less than float32's
_CHUNK_WEIGHTS = 1 << 22  # made plain at a time


def _table(values: Any) -> tuple[float, ...]:
    return tuple(float(v) for v in np.asarray(values, np.float32))


NF4 = _table(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
_FP4_HALF = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
# bitsandbytes' own order of sign, exponent and mantissa; it knows no negative zero.
FP4 = _table([*_FP4_HALF, 0, *-_FP4_HALF[1:]])
_E2M1_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = _table([*_E2M1_HALF, *-_E2M1_HALF])
SIGNED = _table(range(-8, 8))  # int4 without zero points, stored as value + 8
UNSIGNED = _table(range(16))  # int4 with them

Parts = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class CodedForm:
    """Of `CodedWeight`: 16 values, and a scale for each group of a row."""

    table: tuple[float, ...]
    group_size: int
    scales: np.dtype = FLOAT32
    zeros: bool = False

    @property
    def largest(self) -> float:
        """The largest magnitude of the values."""
        return max(map(abs, self.table))

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of each part of a weight of this shape."""
        *lead, d_in = shape
        groups = (*lead, d_in // self.group_size)
        parts = {"codes": ((*lead, d_in // 2), UINT8), "scales": (groups, self.scales)}
        return parts | ({"zeros": (groups, UINT8)} if self.zeros else {})

    def values(self, parts: Parts) -> np.ndarray:
        """Return the float32 values [rows, d_in] that the parts of some rows stand for."""
        codes, scales = parts["codes"], parts["scales"].astype(np.float32)
        pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, self.group_size)
        values = np.array(self.table, np.float32)[pairs]
        if self.zeros:
            values -= parts["zeros"].astype(np.float32)[..., None]
        values *= scales[..., None]
        return values.reshape(len(codes), -1)

    def weight(self, parts: Mapping[str, Any], shape: tuple[int, ...], dtype: Any) -> CodedWeight:
        """Return the device's weight of a dtype, of arrays on the device."""
        del shape
        zeros = parts.get("zeros")
        return CodedWeight(parts["codes"], parts["scales"], zeros, self.table, jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class ScaledForm:
    """Of `ScaledWeight`: e4m3 values, and a scale for each run of `columns` in a row."""

    columns: int

    def parts(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of each part of a weight of this shape."""
        *lead, d_in = shape
        return {
            "values": (tuple(shape), FLOAT8),
            "scales": ((*lead, -(-d_in // self.columns)), FLOAT32),
        }

    def values(self, parts: Parts) -> np.ndarray:
        """Return the float32 values [rows, d_in] that the parts of some rows stand for."""
        values = parts["values"].astype(np.float32)
        values *= parts["scales"].repeat(self.columns, axis=1)[:, : values.shape[1]]
        return values

    def weight(self, parts: Mapping[str, Any], shape: tuple[int, ...], dtype: Any) -> ScaledWeight:
        """Return the device's weight of a dtype, of arrays on the device."""
        block = (1, min(self.columns, shape[-1]))
        return ScaledWeight(parts["values"], parts["scales"], block, jnp.dtype(dtype))


Form = CodedForm | ScaledForm


@dataclasses.dataclass(frozen=True)
class AbstractQuantisedTensor(abc.ABC):
    """A matrix of a checkpoint, stored in several tensors; in their place in `Checkpoint`."""

    name: str
    shape: tuple[int, int]
    dtype: np.dtype  # of the model: plain values are rounded to it

    @property
    @abc.abstractmethod
    def form(self) -> Form:
        """Form of the device that holds the same values."""

    @abc.abstractmethod
    def rows_of(self, part: str, rows: range) -> np.ndarray:
        """Return some rows of one part of the form, in the part's dtype; reads only that part."""

    def read_part(self, part: str, index: Index, out: np.ndarray) -> None:
        """Fill `out` with rows and columns of one part, columns being those of the part."""
        rows, columns = index
        out[...] = self.rows_of(part, rows)[:, columns.start : columns.stop : columns.step]

    def read(self, index: Index, out: np.ndarray) -> None:
        """Fill `out` with plain values, rounded to the model's dtype and then to out's."""
        (rows, columns), form = index, self.form
        names = form.parts(self.shape)
        for start, chunk in chunks(rows, self.shape[1]):
            parts = {name: self.rows_of(name, chunk) for name in names}
            values = form.values(parts).astype(self.dtype)
            chosen = values[:, columns.start : columns.stop : columns.step]
            out[start : start + len(chunk)] = chosen.astype(out.dtype)


def chunks(rows: range, width: int) -> Iterator[tuple[int, range]]:
    """Yield places in and parts of a range of rows that are made plain at a time."""
    step = max(1, _CHUNK_WEIGHTS // max(1, width))
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]


def pack(codes: np.ndarray) -> np.ndarray:
    """Return uint8 [rows, d_in / 2] of codes uint8 [rows, d_in]: even columns in the low half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def scale_dtype(stored: np.dtype) -> np.dtype:
    """Return the dtype of scales on the device: bfloat16 stays so, others are exact in float32."""
    return BFLOAT16 if stored == BFLOAT16 else FLOAT32


def expect(stored: CheckpointTensor, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has this dtype and shape."""
    if stored.dtype != dtype or stored.shape != shape:
        raise ValueError(
            f"{stored.name} is {stored.dtype} {stored.shape}, expected {dtype} {shape}."
        )


def expect_scales(stored: CheckpointTensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has floats of at most 32 bits and this shape."""
    expect(stored, stored.dtype if stored.dtype in _SCALES else FLOAT32, shape)


def finite(values: np.ndarray, name: str, largest: float = 1.0) -> np.ndarray:
    """Return scales as they are, of values of magnitudes up to `largest`.

    Negative scales are allowed: AutoRound writes them for symmetric int4. Raises ValueError with
    the tensor's name if one is NaN or infinite, or a product with it may be.
    """
    most = np.abs(values.astype(np.float32)).max(initial=0)  # NaN if one is
    if not most <= _LARGEST:
        raise ValueError(f"{name} holds values that are not finite.")
    if most > _LARGEST / largest:
        raise ValueError(
            f"{name} holds a scale of magnitude {most:g}: times {largest:g}, the largest value of "
            f"the format, it is above {_LARGEST:g}. Write the checkpoint anew."
        )
    return values


def magnitudes(values: np.ndarray, name: str) -> np.ndarray:
    """Return scales that are magnitudes as they are; ValueError as `finite`, or if one is < 0."""
    if (finite(values, name) < 0).any():
        raise ValueError(
            f"{name} holds {values.min():g}: it is the largest magnitude of a block, which is not "
            "negative. Write the checkpoint anew."
        )
    return values
