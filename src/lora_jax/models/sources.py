"""Weight rules: frozen maps from tensors of a checkpoint to parameters, read by slices.

A source is an array that is not read yet. Sources nest: `Slice(Tensor(...), 1, 0, 24)` is the
first 24 columns. Any box of a source can be read alone, into memory that the caller gives, so
that a sharded parameter never needs its whole self on the host.

A source of quantised matrices has a `form`: then the parts of its device form can be read too, by
the same leading axes and rows. Sources that change columns have none, and give plain values; but
transposed FP8 experts have one.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from lora_jax.models import mxfp4
from lora_jax.models.checkpoint import AbstractTensor, Checkpoint, Index
from lora_jax.models.quantised.forms import BFLOAT16, E2M1, CodedForm, Form
from lora_jax.models.quantised.fp8 import Fp8Stack


@runtime_checkable
class Source(Protocol):
    """An array made of checkpoint tensors. Names may hold placeholders until `at` fills them."""

    def fill(self, places: dict[str, str]) -> "Source":
        """Return this source with {layer}, ... in its names replaced."""
        ...

    def names(self) -> Iterator[str]:
        """Yield the tensors it is made of."""
        ...

    def shape(self, files: Checkpoint) -> tuple[int, ...]: ...

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        """Fill `out` with the elements of the index, converted to out's dtype."""
        ...

    def form(self, files: Checkpoint) -> Form | None:
        """Return the device form of the same values; None if there are only plain ones."""
        ...

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        """Fill `out` with the elements of one part of the form; columns are those of the part."""
        ...


class _Plain:
    """A source without a device form of its own."""

    def form(self, files: Checkpoint) -> None:
        return None

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        raise AssertionError(f"a source without a form has no {part}")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor as it is."""

    name: str

    def fill(self, places: dict[str, str]) -> "Tensor":
        return Tensor(_fill(self.name, places))

    def names(self) -> Iterator[str]:
        yield self.name

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        return files[self.name].shape

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        files[self.name].read(index, out)

    def form(self, files: Checkpoint) -> Form | None:
        return files[self.name].form

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        files[self.name].read_part(part, index, out)


@dataclasses.dataclass(frozen=True)
class Stack:
    """`count` tensors, {expert} in the name running from 0, as one with a new first axis."""

    name: str
    count: int

    def fill(self, places: dict[str, str]) -> "Stack":
        return Stack(_fill(self.name, places), self.count)

    def member(self, expert: int) -> Tensor:
        return Tensor(self.name.replace("{expert}", str(expert)))

    def names(self) -> Iterator[str]:
        return (self.member(expert).name for expert in range(self.count))

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        shapes = {self.member(expert).shape(files) for expert in range(self.count)}
        if len(shapes) > 1:
            raise ValueError(f"{self.name} has several shapes: {sorted(shapes)}.")
        return (self.count, *shapes.pop())

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        for position, expert in enumerate(index[0]):
            self.member(expert).read(files, index[1:], out[position])

    def form(self, files: Checkpoint) -> Form | None:
        forms = {self.member(expert).form(files) for expert in range(self.count)}
        if len(forms) > 1:
            raise ValueError(f"{self.name}: experts of one layer are stored in several formats.")
        return forms.pop()

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        for position, expert in enumerate(index[0]):
            self.member(expert).read_part(files, part, index[1:], out[position])


@dataclasses.dataclass(frozen=True)
class Slice:
    """Elements start, start + step, ... below stop of one axis (-1 is the last)."""

    of: Source
    axis: int
    start: int
    stop: int
    step: int = 1

    def fill(self, places: dict[str, str]) -> "Slice":
        return dataclasses.replace(self, of=self.of.fill(places))

    def names(self) -> Iterator[str]:
        return self.of.names()

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        shape = list(self.of.shape(files))
        if self.stop > shape[self.axis]:
            raise ValueError(
                f"{next(self.names())} has shape {tuple(shape)}: axis {self.axis} ends before "
                f"{self.stop}."
            )
        shape[self.axis] = len(range(self.start, self.stop, self.step))
        return tuple(shape)

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        self.of.read(files, self._inner(index), out)

    def form(self, files: Checkpoint) -> Form | None:
        columns = self.axis in (-1, len(self.of.shape(files)) - 1)
        return None if columns else self.of.form(files)

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        self.of.read_part(files, part, self._inner(index), out)

    def _inner(self, index: Index) -> Index:
        """Return the index in the source that this is a part of."""
        inner, wanted = list(index), index[self.axis]
        chosen = range(self.start, self.stop, self.step)
        inner[self.axis] = chosen[wanted.start : wanted.stop : wanted.step]
        return tuple(inner)


@dataclasses.dataclass(frozen=True)
class Transpose:
    """The last two axes exchanged."""

    of: Source

    def fill(self, places: dict[str, str]) -> "Transpose":
        return Transpose(self.of.fill(places))

    def names(self) -> Iterator[str]:
        return self.of.names()

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        *lead, rows, columns = self.of.shape(files)
        return (*lead, columns, rows)

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        *lead, rows, columns = index
        self.of.read(files, (*lead, columns, rows), np.swapaxes(out, -1, -2))

    def form(self, files: Checkpoint) -> Form | None:
        turned = self._turned(files)
        return None if turned is None else turned.form

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        turned = self._turned(files)
        assert turned is not None, f"a source without a form has no {part}"
        turned.read_part(part, index, out)

    def _turned(self, files: Checkpoint) -> Fp8Stack | None:
        stored = files[self.of.name] if isinstance(self.of, Tensor) else None
        return stored.turned() if isinstance(stored, Fp8Stack) else None


@dataclasses.dataclass(frozen=True)
class Unflatten(_Plain):
    """[count * n, ...] seen as [count, n, ...]."""

    of: Source
    count: int

    def fill(self, places: dict[str, str]) -> "Unflatten":
        return Unflatten(self.of.fill(places), self.count)

    def names(self) -> Iterator[str]:
        return self.of.names()

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        rows, *rest = self.of.shape(files)
        if rows % self.count:
            name = next(self.names())
            raise ValueError(f"{name}: {rows} rows do not divide into {self.count} equal parts.")
        return (self.count, rows // self.count, *rest)

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        size = self.shape(files)[1]
        for position, group in enumerate(index[0]):
            rows = range(group * size, (group + 1) * size)
            chosen = rows[index[1].start : index[1].stop : index[1].step]
            self.of.read(files, (chosen, *index[2:]), out[position])


@dataclasses.dataclass(frozen=True)
class Oriented:
    """[..., rows, columns], whichever of the two the file has as the last axis.

    `straight` are the sizes wanted. Where they are equal, `sibling`, which the file turns alike,
    tells by its own sizes.
    """

    of: Source
    straight: tuple[int, int]
    sibling: Source
    sibling_straight: tuple[int, int]

    def fill(self, places: dict[str, str]) -> "Oriented":
        filled = {name: getattr(self, name).fill(places) for name in ("of", "sibling")}
        return dataclasses.replace(self, **filled)

    def names(self) -> Iterator[str]:
        return self.of.names()

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        return self._source(files).shape(files)

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        self._source(files).read(files, index, out)

    def form(self, files: Checkpoint) -> Form | None:
        return self._source(files).form(files)

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        self._source(files).read_part(files, part, index, out)

    def _source(self, files: Checkpoint) -> Source:
        rules = self.of, self.straight
        if self.straight[0] == self.straight[1]:
            rules = self.sibling, self.sibling_straight
        source, (rows, columns) = rules
        if rows == columns:
            raise ValueError(f"{next(self.names())}: its orientation cannot be told by its sizes.")
        is_turned = source.shape(files)[-2:] == (columns, rows)
        return Transpose(self.of) if is_turned else self.of


@dataclasses.dataclass(frozen=True)
class Flatten(_Plain):
    """[rows, ...] seen as [rows, the rest side by side]: the map that a convolution is."""

    of: Source

    def fill(self, places: dict[str, str]) -> "Flatten":
        return Flatten(self.of.fill(places))

    def names(self) -> Iterator[str]:
        return self.of.names()

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        rows, *rest = self.of.shape(files)
        return (rows, math.prod(rest))

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        rest = self.of.shape(files)[1:]
        whole = np.empty((len(index[0]), *rest), out.dtype)
        self.of.read(files, (index[0], *(range(n) for n in rest)), whole)
        columns = index[1]
        flat = whole.reshape(len(index[0]), -1)
        out[...] = flat[:, columns.start : columns.stop : columns.step]


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """`name`_blocks [..., rows, groups, 16] and `name`_scales as one array [..., rows, columns]."""

    name: str

    def fill(self, places: dict[str, str]) -> "Mxfp4":
        return Mxfp4(_fill(self.name, places))

    def names(self) -> Iterator[str]:
        yield from (f"{self.name}_blocks", f"{self.name}_scales")

    def shape(self, files: Checkpoint) -> tuple[int, ...]:
        blocks, scales = (files[name].shape for name in self.names())
        if blocks != (*scales, mxfp4.BLOCK // 2):
            raise ValueError(f"{self.name}: blocks {blocks} do not fit scales {scales}.")
        return (*scales[:-1], scales[-1] * mxfp4.BLOCK)

    def read(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        if len(index) > 2:  # one expert at a time keeps the packed copy small
            for position, expert in enumerate(index[0]):
                self._read_matrix(files, (range(expert, expert + 1), *index[1:]), out[position])
        else:
            self._read_matrix(files, index, out)

    def form(self, files: Checkpoint) -> Form | None:
        return CodedForm(E2M1, mxfp4.BLOCK, BFLOAT16)

    def read_part(self, files: Checkpoint, part: str, index: Index, out: np.ndarray) -> None:
        *lead, columns = index
        blocks, scales = self.names()
        stored = _stored_bytes(files[blocks if part == "codes" else scales], lead)
        flat = stored.reshape(*stored.shape[: len(lead)], -1)
        values = flat if part == "codes" else mxfp4.powers_of_two(flat, scales)
        out[...] = values[..., columns.start : columns.stop : columns.step].astype(out.dtype)

    def _read_matrix(self, files: Checkpoint, index: Index, out: np.ndarray) -> None:
        *lead, columns = index
        *_, scales_name = self.names()
        blocks, scales = (_stored_bytes(files[name], lead) for name in self.names())
        values = mxfp4.dequantize(blocks, scales, out.dtype, scales_name)
        values = values[..., columns.start : columns.stop : columns.step]
        out[...] = values.reshape(out.shape)


def _stored_bytes(stored: AbstractTensor, lead: Sequence[range]) -> np.ndarray:
    """Return bytes at an index of the leading axes, the other axes whole."""
    tail = stored.shape[len(lead) :]
    buffer = np.empty((*(len(r) for r in lead), *tail), np.uint8)
    stored.read((*lead, *(range(n) for n in tail)), buffer)
    return buffer


@dataclasses.dataclass(frozen=True)
class WeightRule:
    """Rule for parameters whose path matches: the first source that the files have.

    `parameter` and the sources' names share placeholders: {layer} is a number, any other, such as
    {name}, a word.
    """

    parameter: str
    sources: tuple[Source, ...]

    def match(self, path: str) -> tuple[Source, ...]:
        """Return the alternatives for the parameter at `path`, none if the rule is another's."""
        pattern = re.sub(
            r"\\{(\w+)\\}",
            lambda m: rf"(?P<{m[1]}>\d+)" if m[1] == "layer" else rf"(?P<{m[1]}>\w+)",
            re.escape(self.parameter),
        )
        matched = re.fullmatch(pattern, path)
        return tuple(s.fill(matched.groupdict()) for s in self.sources) if matched else ()


def weight(parameter: str, *sources: str | Source) -> WeightRule:
    """Return the rule of a parameter; a plain string is a tensor taken as it is."""
    return WeightRule(parameter, tuple(Tensor(s) if isinstance(s, str) else s for s in sources))


def _fill(name: str, places: dict[str, str]) -> str:
    for key, value in places.items():
        name = name.replace("{" + key + "}", value)
    return name
