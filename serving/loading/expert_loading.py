"""Writes ESFT adapters' experts between steps, and takes them out when no step can read them.

Memory is written by the host, not in the order of the device's steps. So an expert is written only
where nothing lies, the reroute tables name it when all of its adapter is there, and its memory
goes when every step that was dispatched before has been read back.
"""

import contextlib
import functools
import logging
from collections import deque

import jax
import numpy as np

from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertPlacement
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.memory.retirement import Retirement
from lora_jax.memory.virtual import OutOfPages
from lora_jax.models.expert_tensors import ExpertTensors
from lora_jax.models.split_experts import SplitExpertTensors
from lora_jax.typing import Array, Int

logger = logging.getLogger(__name__)

# One chunk of a load. That is more than for LoRA: threads copy while steps run.
CHUNK_BYTES = 4 << 20
FREED_AT_ONCE = 12  # experts, of which each takes a GPU's driver some 0.3 ms
_TROUBLE = (MemoryError, ValueError, OSError, RuntimeError)  # what a virtual memory may raise

AnyTensors = ExpertTensors | SplitExpertTensors
Tables = Int[Array, "moe_layers esft_slots experts"]


def identity_tables(num_layers: int, num_slots: int, num_experts: int) -> np.ndarray:
    """Return reroute tables of slots that replace nothing."""
    return np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, num_slots, 1))


class ExpertLoadJob:
    """The matrices that bring one placed adapter into the tensors, a few at a time.

    All experts get their memory first, a layer's together: a GPU's driver lets a mapping wait for
    copies that are on their way. Nobody waits for the bytes before the adapter's rows of the
    reroute tables, the last thing written.
    """

    def __init__(self, placement: ExpertPlacement, tensors: AnyTensors):
        self._placement, self._tensors = placement, tensors
        self._matrices = deque(
            (layer, index, name, matrix)
            for layer, experts in placement.indices.items()
            for expert, index in experts.items()
            for name, matrix in zip(
                PROJECTIONS, placement.weights.experts[layer][expert], strict=True
            )
        )
        self._unmapped = deque(placement.indices)  # layers
        self._chunks = -(-tensors.matrix_bytes // CHUNK_BYTES)  # of one matrix
        self._published = False

    @property
    def remaining(self) -> int:
        """Chunks still to do, a layer's memory and the tables one each; 0: it is usable."""
        written = len(self._matrices) * self._chunks
        return len(self._unmapped) + written + (not self._published)

    @property
    def done(self) -> bool:
        return self._published

    def advance(self, tables: Tables, max_chunks: int) -> Tables:
        """Return the tables after up to `max_chunks` more chunks, but at least one of them.

        Raises LoadFailed when the memory gives none; what is written then stays without use.
        """
        try:
            max_chunks -= self._map_some(max_chunks)
            max_chunks -= self._begin_some(max_chunks)
            if self._published or max_chunks < 1:
                return tables
            self._tensors.finish_writes()
        except _TROUBLE as error:
            with contextlib.suppress(*_TROUBLE):  # bytes may be on their way to what is unmapped
                self._tensors.finish_writes()
            raise LoadFailed(str(error), may_pass=isinstance(error, OutOfPages)) from error
        self._published = True
        host = np.array(tables)
        host[:, self._placement.slot] = self._placement.table
        return jax.device_put(host, tables.sharding)

    def _map_some(self, max_chunks: int) -> int:
        """Give up to so many layers' experts their memory; return how many."""
        mapped = 0
        while self._unmapped and mapped < max_chunks:
            layer = self._unmapped[0]
            self._tensors.map_experts(layer, self._placement.indices[layer])
            self._unmapped.popleft()
            mapped += 1
        return mapped

    def _begin_some(self, max_chunks: int) -> int:
        """Send matrices on their way until so many chunks are reached; return how many."""
        begun = 0
        while self._matrices and begun < max_chunks:
            layer, index, name, matrix = self._matrices.popleft()
            self._tensors.begin_write(layer, index, name, matrix)
            begun += self._chunks
        return begun


class ExpertRoom:
    """Loads into the expert tensors, and gives back what adapters leave; the engine's thread."""

    def __init__(self, tensors: AnyTensors, allocator: ExpertAllocator):
        self.tensors, self.allocator = tensors, allocator
        self._retirement = Retirement()
        self._freeing: deque[tuple[ExpertPlacement, deque[tuple[int, int]]]] = deque()

    def job(self, placement: ExpertPlacement, tables: Tables) -> ExpertLoadJob:
        """Return the job that loads a placed adapter."""
        return ExpertLoadJob(placement, self.tensors)

    def collect(self, dispatched: int, read: int) -> int:
        """Free some of what no step can read any more; returns how many adapters have gone by it.

        `dispatched` steps have been sent to the device so far, the results of `read` have come
        back.
        """
        before = self.allocator.num_leaving
        for placement in self.allocator.take_left():
            places = placement, deque(placement.places)
            self._retirement.defer(dispatched - 1, functools.partial(self._freeing.append, places))
        self._retirement.completed(read - 1)
        self._free_some()
        return before - self.allocator.num_leaving

    @property
    def is_busy(self) -> bool:
        """True if anything waits to be freed."""
        return self.allocator.num_leaving > 0

    def close(self) -> None:
        """Give all memory back; nothing may run on the device any more."""
        self.tensors.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when memory is held for nobody."""
        self.tensors.check_integrity()
        assert not self._retirement.num_waiting, "experts wait for a step that has been read"
        assert not self._freeing, "experts of adapters that have left are still there"

    def _free_some(self) -> None:
        """Unmap so few experts that a step does not wait for long."""
        left = FREED_AT_ONCE
        while self._freeing and left:
            placement, places = self._freeing[0]
            while places and left:
                left -= 1
                layer, index = places.popleft()
                try:
                    self.tensors.unmap(layer, index)
                except _TROUBLE:
                    logger.exception(
                        "The memory of expert %d of layer %d could not be released.", index, layer
                    )
            if not places:
                self._freeing.popleft()
                self.allocator.reclaim(placement)
