"""bitsandbytes' 4-bit matrices: NF4 and FP4, with plain or nested scales.

`X.weight` holds the codes of the flat matrix, the earlier weight in the high half of a byte, in
whatever dtype quant_storage names. Beside it stand `absmax` (one scale per `blocksize` weights),
`quant_map` (the 16 values) and, as JSON bytes, `quant_state.bitsandbytes__nf4` (or `__fp4`). Nested
scales are codes themselves: absmax[i] = nested_quant_map[code] * nested_absmax[i // 256] +
nested_offset. Where `blocksize` does not divide a row, blocks continue in the next one: such a map
can be made plain only, which the loader does in vision towers.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from lora_jax.models.checkpoint import CheckpointTensor, Index
from lora_jax.models.quantised.forms import (
    FLOAT32,
    FP4,
    NF4,
    UINT8,
    AbstractQuantisedTensor,
    CodedForm,
    chunks,
    expect,
    finite,
    magnitudes,
)

TABLES = {"nf4": NF4, "fp4": FP4}
STATE = ".quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map")
_NESTED = ("nested_absmax", "nested_quant_map")
_LARGEST_STATE = 4096  # bytes
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class _Nested:
    """Coding of the scales themselves."""

    table: np.ndarray  # float32 [256]
    absmax: np.ndarray  # float32 [ceil(scales / blocksize)]
    offset: float
    blocksize: int

    def values(self, codes: np.ndarray, first: np.ndarray, name: str) -> np.ndarray:
        """Return the scales of codes whose flat places are `first`, in float32.

        Scales near 0 may come out slightly negative. ValueError names the codes' tensor if one is
        not finite.
        """
        with np.errstate(over="ignore"):
            scaled = self.table[codes] * self.absmax[first // self.blocksize]
            return finite(scaled + np.float32(self.offset), name)


@dataclasses.dataclass(frozen=True, eq=False)
class BitsandbytesTensor(AbstractQuantisedTensor):
    """One matrix in NF4 or FP4."""

    table: tuple[float, ...]
    codes: CheckpointTensor  # uint8 [d_out, d_in / 2]
    absmax: CheckpointTensor  # [d_out, d_in / blocksize]
    nested: _Nested | None

    @property
    def form(self) -> CodedForm:
        return CodedForm(self.table, self.shape[1] // self.absmax.shape[1])

    def rows_of(self, part: str, rows: range) -> np.ndarray:
        if part == "codes":
            packed = self.codes.rows(rows)
            return packed >> 4 | packed << 4
        scales = self.absmax.rows(rows)
        if self.nested is None:
            return magnitudes(scales, self.absmax.name)
        groups = self.absmax.shape[1]
        flat = np.array(rows)[:, None] * groups + np.arange(groups)[None]
        return self.nested.values(scales, flat, self.absmax.name)


@dataclasses.dataclass(frozen=True, eq=False)
class StraddlingTensor:
    """One matrix in NF4 or FP4 with blocks that continue in the next row: no device form has them.

    `form` raises ValueError, so that only parameters that are made plain can be read.
    """

    name: str
    shape: tuple[int, int]
    dtype: np.dtype  # of the model: plain values are rounded to it
    table: tuple[float, ...]
    codes: CheckpointTensor  # uint8 [d_out, d_in / 2]
    absmax: CheckpointTensor  # [ceil(d_out * d_in / blocksize)]
    nested: _Nested | None
    blocksize: int

    @property
    def form(self) -> CodedForm:
        raise ValueError(
            f"{self.name}: rows of {self.shape[1]} weights are not whole blocks of "
            f"{self.blocksize}; a block must not continue in the next row. Keep this map in 16 "
            "bits (llm_int8_skip_modules)."
        )

    def read_part(self, part: str, index: Index, out: np.ndarray) -> None:
        raise AssertionError(f"{self.name} has no form and no part {part}")

    def read(self, index: Index, out: np.ndarray) -> None:
        """Fill `out` with plain values, rounded to the model's dtype and then to out's."""
        (rows, columns), width = index, self.shape[1]
        scales, table = self._scales(), np.array(self.table, np.float32)
        for start, chunk in chunks(rows, width):
            packed = self.codes.rows(chunk)
            codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(len(chunk), width)
            blocks = (np.array(chunk)[:, None] * width + np.arange(width)) // self.blocksize
            values = (table[codes] * scales[blocks]).astype(self.dtype)
            chosen = values[:, columns.start : columns.stop : columns.step]
            out[start : start + len(chunk)] = chosen.astype(out.dtype)

    def _scales(self) -> np.ndarray:
        """Return float32 [blocks]."""
        stored = self.absmax.whole()
        if self.nested is None:
            return magnitudes(stored, self.absmax.name)
        return self.nested.values(stored, np.arange(len(stored)), self.absmax.name)


def names_of(name: str, tensors: Mapping[str, CheckpointTensor]) -> tuple[str, ...]:
    """Return the tensors beside X.weight that belong to it; none if it is not quantised."""
    names = [f"{name}.{part}" for part in (*_PARTS, *_NESTED)]
    names += [f"{name}{STATE}{kind}" for kind in TABLES]
    return tuple(part for part in names if part in tensors)


def read(
    name: str, tensors: Mapping[str, CheckpointTensor], dtype: np.dtype, format_name: str
) -> BitsandbytesTensor | StraddlingTensor:
    """Return the matrix X.weight; `format_name` is the config's, nf4 or fp4.

    Raises:
        ValueError: a part is missing, or does not fit the others or the config.
    """
    kinds = [kind for kind in TABLES if f"{name}{STATE}{kind}" in tensors]
    missing = [part for part in _PARTS if f"{name}.{part}" not in tensors]
    if len(kinds) != 1 or missing:
        lacks = ", ".join(missing) or f"one of quant_state.bitsandbytes__{'|'.join(TABLES)}"
        raise ValueError(f"{name} is quantised by bitsandbytes and lacks {lacks}.")
    state = _state(tensors[f"{name}{STATE}{kinds[0]}"])
    if not kinds[0] == state.get("quant_type") == format_name:
        raise ValueError(
            f"{name} is {kinds[0]}, its quant_state's quant_type is {state.get('quant_type')!r} "
            f"and the config's bnb_4bit_quant_type is {format_name!r}: all must be the same."
        )
    d_out, d_in = _shape(name, state)
    blocksize = _size(name, state, "blocksize")
    if d_in % 2:
        raise ValueError(f"{name}: rows of {d_in} weights, an odd number, are not supported.")
    _check_table(name, tensors[f"{name}.quant_map"], kinds[0])
    blocks, table = -(-d_out * d_in // blocksize), TABLES[kinds[0]]
    nested = _nested(name, tensors, state, blocks)
    codes = tensors[name].seen_as(UINT8, (d_out, d_in // 2))
    absmax, scale = tensors[f"{name}.absmax"], FLOAT32 if nested is None else UINT8
    if d_in % blocksize:
        absmax = absmax.seen_as(scale, (blocks,))
        parts = (table, codes, absmax, nested, blocksize)
        return StraddlingTensor(name, (d_out, d_in), dtype, *parts)
    absmax = absmax.seen_as(scale, (d_out, d_in // blocksize))
    return BitsandbytesTensor(name, (d_out, d_in), dtype, table, codes, absmax, nested)


def _state(stored: CheckpointTensor) -> dict[str, Any]:
    if stored.dtype != UINT8 or len(stored.shape) != 1 or stored.shape[0] > _LARGEST_STATE:
        raise ValueError(f"{stored.name} is {stored.dtype} {stored.shape}, not JSON bytes.")
    try:
        state = json.loads(stored.whole().tobytes())
    except ValueError as error:
        raise ValueError(f"{stored.name} is not JSON.") from error
    if not isinstance(state, dict):
        raise ValueError(f"{stored.name} is not an object.")
    return state


def _shape(name: str, state: dict[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_size, shape)):
        raise ValueError(f"{name}: the quant_state's shape is {shape!r}, not [d_out, d_in].")
    return shape[0], shape[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(name: str, state: dict[str, Any], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or not _is_size(value) or value % 2:
        raise ValueError(f"{name}: the quant_state's {key} is {value!r}, not an even number.")
    return value


def _check_table(name: str, stored: CheckpointTensor, kind: str) -> None:
    expect(stored, FLOAT32, (16,))
    if not np.array_equal(stored.whole(), np.array(TABLES[kind], np.float32)):
        raise ValueError(f"{name}: its quant_map is not that of {kind}; others are not supported.")


def _nested(
    name: str,
    tensors: Mapping[str, CheckpointTensor],
    state: dict[str, Any],
    count: int,
) -> _Nested | None:
    """Return how `count` scales are coded, None where they are float32."""
    present = [part for part in _NESTED if f"{name}.{part}" in tensors]
    if not present and tensors[f"{name}.absmax"].dtype == FLOAT32:
        return None
    if len(present) < len(_NESTED) or tensors[f"{name}.absmax"].dtype != UINT8:
        want = ", ".join(_NESTED)
        raise ValueError(f"{name}: absmax must be float32, or uint8 with {want} beside it.")
    blocksize = _size(name, state, "nested_blocksize")
    offset = state.get("nested_offset")
    # Not even NaN is at most the largest float32.
    if not isinstance(offset, int | float) or not abs(offset) <= _LARGEST:
        raise ValueError(f"{name}: the quant_state's nested_offset is {offset!r}, not a number.")
    blocks = -(-count // blocksize)
    absmax, table = (tensors[f"{name}.{part}"] for part in _NESTED)
    expect(table, FLOAT32, (256,))
    expect(absmax, FLOAT32, (blocks,))
    values, scales = finite(table.whole(), table.name), magnitudes(absmax.whole(), absmax.name)
    return _Nested(values, scales, float(offset), blocksize)
