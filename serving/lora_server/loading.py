"""An adapter comes onto a rank layer by layer (InfiniLoRA, section 5.3).

A layer may be computed as soon as its own matrices are there, while the later ones are still on
their way: their entries in the table are written when they have come. Where the host copies them,
faster than requests could ask for one layer after the other, later layers come several at a time.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from lora_jax.adapters.lora_allocator import LoraPlacement, RowWrite
from lora_jax.adapters.lora_load_job import LoadFailed, LoraLoadJob
from lora_jax.adapters.row_copies import Copier, LoraCopyJob
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.adapters.weights import AdapterWeights

# Each group costs a turn of the rank's loop, and each request that has caught up with the load an
# answer by the host.
_MOST_TOGETHER = 8


class LayerwiseLoad:
    """The writes of one placed adapter, lowest layer first."""

    def __init__(
        self,
        placement: LoraPlacement,
        part: AdapterWeights,
        slots: AdapterSlots,
        copier: Copier | None = None,
    ):
        """`part` is what was placed; `slots` tells the shapes only. With a `copier` the host copies
        the rows beside the device's programs.
        """
        self.digest, self.slot = placement.digest, placement.slot
        self._num_layers = placement.entries.shape[1]
        layers = sorted({layer for _, layer in part.sites}) or [0]
        groups = _groups(layers, 1 if copier is None else _MOST_TOGETHER)
        writes = _writes_by_layer(placement, part)

        def job(index: int, group: list[int]) -> LoraLoadJob | LoraCopyJob:
            one = _up_to(placement, group[-1], _joined(writes, group), index == 0)
            if copier is None:
                return LoraLoadJob(one, slots)
            return LoraCopyJob(one, slots, copier, is_first=index == 0)

        self._jobs = collections.deque(job(*one) for one in enumerate(groups))
        # The first layer of each job, and the end.
        self._next = collections.deque([*(group[0] for group in groups), self._num_layers])
        self._started = False
        self.failure: LoadFailed | None = None  # why no further layer comes

    @property
    def num_ready(self) -> int:
        """Number of layers, from the lowest, that can be computed; 0 before the first write."""
        return self._next[0] if self._started else 0

    @property
    def remaining(self) -> int:
        """Chunks still to write, the table's entries included."""
        return sum(job.remaining for job in self._jobs)

    @property
    def done(self) -> bool:
        return not self._jobs

    def advance(self, slots: AdapterSlots, max_chunks: int) -> AdapterSlots:
        """Return `slots` (donated) with up to `max_chunks` more chunks written.

        After a write that failed `failure` says why, and the load is to be dropped.
        """
        while self._jobs and max_chunks > 0:
            job = self._jobs[0]
            before = job.remaining
            try:
                slots = job.advance(slots, max_chunks)
            except LoadFailed as error:  # a return, not a raise: the caller needs the slots
                self.failure = error
                return slots
            begun = before - job.remaining
            max_chunks -= begun
            if job.done:
                self._jobs.popleft()
                self._next.popleft()
                self._started = True
            elif not begun:
                break  # its bytes are on their way
        return slots


def _groups(layers: list[int], most: int) -> list[list[int]]:
    """Return the layers in groups of 1, 1, 2, 4, ..., at most `most`."""
    groups, begin = [], 0
    while begin < len(layers):
        size = min(max(begin, 1), most)
        groups.append(layers[begin : begin + size])
        begin += size
    return groups


def _joined(
    writes: dict[int, dict[int, list[RowWrite]]], layers: list[int]
) -> dict[int, list[RowWrite]]:
    """Return the writes of several layers by width, lowest layer first."""
    by_width: dict[int, list[RowWrite]] = {}
    for layer in layers:
        for width, rows in writes.get(layer, {}).items():
            by_width.setdefault(width, []).extend(rows)
    return by_width


def _writes_by_layer(
    placement: LoraPlacement, part: AdapterWeights
) -> dict[int, dict[int, list[RowWrite]]]:
    """Return the row writes by layer and width; a matrix is with the lowest layer that uses it."""
    first: dict[int, int] = {}
    for (_, layer), site in part.sites.items():
        for matrix in (site.a, site.b):
            first[id(matrix)] = min(layer, first.get(id(matrix), layer))
    counts: dict[int, list[int]] = {}
    for width, count in part.demand:
        counts.setdefault(width, []).append(count)
    single = {width: _single(placement.writes[width], of) for width, of in counts.items()}
    by_layer: dict[int, dict[int, list[RowWrite]]] = {}
    for matrix, (width, _) in zip(part.matrices(), part.demand, strict=True):
        by_layer.setdefault(first[id(matrix)], {}).setdefault(width, []).append(next(single[width]))
    return by_layer


def _single(writes: Iterable[RowWrite], counts: Iterable[int]) -> Iterator[RowWrite]:
    """Yield the write of each matrix of one width, whose rows are `counts`, in their order.

    A placement has one write for matrices that follow each other on the host and on the device.
    """
    left, done = iter(writes), 0
    write = next(left)
    for count in counts:
        if done == len(write.rows):
            write, done = next(left), 0
        yield RowWrite(write.offset + done, write.rows[done : done + count])
        done += count


def _up_to(
    placement: LoraPlacement, layer: int, writes: dict[int, list[RowWrite]], is_first: bool
) -> LoraPlacement:
    """Return the placement of one layer, whose table entries hold for all layers so far."""
    loaded = np.arange(placement.entries.shape[1]) <= layer
    return dataclasses.replace(
        placement,
        entries=np.where(loaded[None, :, None], placement.entries, 0).astype(np.int32),
        scaling=np.where(loaded[None], placement.scaling, 0).astype(np.float32),
        writes={width: tuple(rows) for width, rows in writes.items()},
        cleared_slots=placement.cleared_slots if is_first else (),
    )
