"""A model's experts in virtual weight tensors, with addresses for adapters' experts behind them.

ExpertWeave, section 4.2: each matrix kind of each layer is one array [num_experts + extra, d_out,
d_in] whose shape never changes. The base's experts are the first ones; an index behind them has
memory only while an adapter's expert lies there.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.moe import Experts, MoeBlock
from lora_jax.ops.grouped_matmul import QUANTISED

LARGEST_PAGE = 2 << 20
_PAGES_PER_TENSOR = 8  # at least, of the base's part, so that the last one's waste is small


@dataclasses.dataclass(frozen=True)
class ExpertPages:
    """Physical bytes of the experts, in whole pages."""

    base_bytes: int
    used_bytes: int  # the base's included
    created_bytes: int  # with those that wait for the next adapter
    page_bytes: int


class ExpertTensors:
    """Takes over the experts of a model; one thread maps, writes and unmaps.

    Nothing here waits: the caller unmaps only what no step in flight can read.
    """

    def __init__(
        self,
        model: AbstractCausalLM,
        memory: AbstractVirtualMemory,
        *,
        extra: int,
        extra_bytes: int | None = None,
        page_bytes: int | None = None,
        device: Any = None,  # a jax.Device
    ):
        """Move the experts matrix by matrix, so that one is there twice at a time.

        With `device` they are what this device of a split model has of them, and nothing moves
        before `move_in` is called.

        `extra` indices of every layer are for adapters, `extra_bytes` is the memory they may take
        (None: all that fits behind the indices), `page_bytes` None derives from the sizes.

        Raises:
            ValueError: the model has no experts, or experts with biases.
            OutOfPages: there is no memory for them; the model is then unusable.
        """
        blocks = _replaceable(expert_blocks(model))
        self.layers, self.extra = tuple(blocks), extra
        self._memory, self._device = memory, device
        params = [getattr(e, name) for e in blocks.values() for name in PROJECTIONS]
        self.num_experts = self._own(params[0]).shape[0]
        sizes = [self._own(param).nbytes for param in params]
        page = page_bytes or page_size(min(sizes), memory.granularity)
        self._base_bytes = _whole_pages(sizes, page)
        budget = self._budget(sizes, page, extra_bytes)
        self.pool = PagePool(memory, page_bytes=page, budget_bytes=budget)
        self._tensors: dict[tuple[int, str], WeightTensor] = {}
        self._mapped: set[tuple[int, int]] = set()  # (layer, index) of adapters' experts
        self._failed: Exception | None = None  # of a write
        self.is_shared = False  # others take pages of the pool, too
        if device is not None:
            return
        try:
            for layer, experts in blocks.items():
                for name in PROJECTIONS:
                    param = getattr(experts, name)
                    moved = self.move_in(layer, name, param)
                    setattr(experts, name, param.replace(moved))
        except BaseException:
            self.close()
            raise

    def _budget(self, sizes: list[int], page: int, extra_bytes: int | None) -> int:
        """Return the bytes of all pages, where the base's tensors have these sizes."""
        if extra_bytes is not None:
            return self._base_bytes + extra_bytes // page * page
        experts = self.num_experts + self.extra
        return _whole_pages([size // self.num_experts * experts for size in sizes], page)

    @property
    def base_pages(self) -> int:
        """Pages of the base's experts, which stay."""
        return self._base_bytes // self.pool.page_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, all its matrices together."""
        first = self.layers[0]
        return sum(self._tensors[first, name].expert_bytes for name in PROJECTIONS)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the largest matrix of an expert."""
        first = self.layers[0]
        return max(self._tensors[first, name].expert_bytes for name in PROJECTIONS)

    @property
    def mapped(self) -> frozenset[tuple[int, int]]:
        """(layer, index) of the adapters' experts that have memory."""
        return frozenset(self._mapped)

    def map(self, layer: int, index: int) -> None:
        """Give the expert at an index memory in all its tensors, or OutOfPages and in none."""
        self.map_all(layer, (index,))

    def map_experts(self, layer: int, indices: Mapping[int, int]) -> None:
        """Give memory, as `map_all` does, to what replaces experts: indices by expert."""
        self.map_all(layer, indices.values())

    def map_all(self, layer: int, indices: Iterable[int]) -> None:
        """Give experts of a layer memory in all its tensors, or OutOfPages and none of them."""
        wanted = sorted(indices)
        if wanted and wanted[0] < self.num_experts:
            raise ValueError(f"Expert {wanted[0]} of layer {layer} is the base's.")
        done: list[tuple[WeightTensor, range]] = []
        try:
            for name in PROJECTIONS:
                for run in runs(wanted):  # one call of the driver for the access of all its pages
                    self._tensors[layer, name].map(run)
                    done.append((self._tensors[layer, name], run))
        except BaseException:
            for tensor, run in done:
                tensor.unmap(run)
            raise
        self._mapped.update((layer, index) for index in wanted)

    def write(self, layer: int, index: int, projection: str, matrix: np.ndarray) -> None:
        """Set one matrix [d_out, d_in] of a mapped adapter's expert, in the model's dtype."""
        self.begin_write(layer, index, projection, matrix)
        self.finish_writes()

    def begin_write(self, layer: int, index: int, projection: str, matrix: np.ndarray) -> None:
        """Do what `write` does by the time `finish_writes` returns; till then `matrix` stays."""
        tensor = self._tensor_of(layer, index, projection)
        tensor.begin_write(index, matrix.astype(tensor.dtype, copy=False)[None])

    def settle(self) -> None:
        """Return when nothing that was begun is under way; what failed, finish_writes raises."""
        try:
            self._memory.finish_writes()
        except (ValueError, MemoryError, OSError, RuntimeError) as error:
            self._failed = self._failed or error

    def finish_writes(self) -> None:
        """Return when all that was begun is there; raises what failed since the last call."""
        self.settle()
        error, self._failed = self._failed, None
        if error:
            raise error

    def write_array(self, layer: int, index: int, projection: str, matrix: jax.Array) -> None:
        """Set one matrix [d_out, d_in] of a mapped expert at once, from an array on the device."""
        self._tensor_of(layer, index, projection).write_array(index, matrix[None])

    def unmap(self, layer: int, index: int) -> None:
        """Take the memory of an adapter's expert, if it has any; pages others lie on stay.

        When the system refuses, its error is raised after all tensors were tried; pages that it
        keeps are used again for the same index.
        """
        if (layer, index) not in self._mapped:
            return
        self._mapped.discard((layer, index))
        failed: Exception | None = None
        for name in PROJECTIONS:
            try:
                self._tensors[layer, name].unmap(range(index, index + 1))
            except (ValueError, MemoryError, OSError, RuntimeError) as error:
                failed = error
        if failed:
            raise failed

    def pages(self) -> ExpertPages:
        """Return the physical bytes of this moment; any thread may ask."""
        stats = self.pool.stats()
        used = sum(tensor.bytes_mapped for tensor in self._tensors.values())
        created = stats.created * stats.page_bytes
        return ExpertPages(self._base_bytes, used, created, stats.page_bytes)

    def trim(self) -> None:
        """Give the device the pages back that no expert lies on."""
        if self.pool.stats().free:
            self.pool.trim()

    def close(self) -> None:
        """Give all memory back; the model's arrays are unusable. Nothing may run any more."""
        self.settle()
        for tensor in self._tensors.values():
            tensor.close()
        self._tensors.clear()
        self.pool.trim()

    def check_integrity(self) -> None:
        """Raise AssertionError when pages, tensors and mapped experts disagree."""
        self.pool.check_integrity()
        for (layer, name), tensor in self._tensors.items():
            tensor.check_integrity()
            indices = {index for where, index in self._mapped if where == layer}
            assert set(tensor.mapped) == {*range(self.num_experts), *indices}, (layer, name)
        used = self.pages().used_bytes
        assert self.is_shared or used == self.pool.stats().in_use * self.pool.page_bytes, (
            "pages that belong to no tensor"
        )

    def _tensor_of(self, layer: int, index: int, projection: str) -> WeightTensor:
        if (layer, index) not in self._mapped:
            raise ValueError(f"Expert {index} of layer {layer} is no adapter's.")
        return self._tensors[layer, projection]

    def move_in(self, layer: int, name: str, param: nnx.Param) -> jax.Array:
        """Copy a weight of the base to the first indices, and return the array of all indices."""
        value = self._own(param)
        count, d_out, d_in = value.shape
        shape = (count + self.extra, d_out, d_in)
        tensor = WeightTensor(self.pool, shape, np.dtype(value.dtype))
        self._tensors[layer, name] = tensor
        tensor.map(range(count))
        tensor.write_array(0, value)
        return tensor.array

    def _own(self, param: nnx.Param) -> jax.Array:
        """Return a weight, or what the device of a split model has of it."""
        value: jax.Array = param[...]
        if self._device is None:
            return value
        return next(s.data for s in value.addressable_shards if s.device == self._device)


def expert_blocks(model: AbstractCausalLM) -> dict[int, Experts]:
    """Return the experts of every layer that has them, by layer."""
    mlps = ((n, layer.mlp) for n, layer in enumerate(model.layers))
    return {n: mlp.experts for n, mlp in mlps if isinstance(mlp, MoeBlock)}


def has_quantised(blocks: Iterable[Experts]) -> bool:
    """Return whether a matrix of any of these experts is quantised."""
    values = (getattr(experts, name)[...] for experts in blocks for name in PROJECTIONS)
    return any(isinstance(value, QUANTISED) for value in values)


def _replaceable(blocks: dict[int, Experts]) -> dict[int, Experts]:
    """Return experts that adapters can replace. Raises ValueError for others."""
    if not blocks:
        raise ValueError("The model has no experts.")
    if any(experts.gate_bias is not None for experts in blocks.values()):
        raise ValueError("Experts with biases cannot be replaced by adapters.")
    if has_quantised(blocks.values()):
        raise ValueError("Quantised experts cannot be replaced by adapters.")
    return blocks


def runs(indices: Sequence[int]) -> Iterator[range]:
    """Yield the runs of consecutive indices of a sorted list."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield range(indices[start], indices[end - 1] + 1)
            start = end


def page_size(tensor_bytes: int, granularity: int) -> int:
    """Return the bytes of a page: the memory's granularity, doubled while pages stay small.

    A tensor of `tensor_bytes` has at least a few, and none is larger than LARGEST_PAGE unless the
    memory has no smaller ones.
    """
    size = granularity
    while 2 * size <= min(LARGEST_PAGE, tensor_bytes // _PAGES_PER_TENSOR):
        size *= 2
    return size


def _whole_pages(sizes: Sequence[int], page_bytes: int) -> int:
    """Return the bytes of the pages under tensors that share none."""
    return sum(-(-size // page_bytes) for size in sizes) * page_bytes
