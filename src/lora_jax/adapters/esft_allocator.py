"""Residency of ESFT adapters: slots, and indices of the expert tensors. No jax.

See `allocator` for the life of an adapter. An adapter's experts may lie at any free indices of
their layer, taken lowest first: so nothing is lost to gaps, whatever came and went, and neighbours
share the page at their border (ExpertWeave, section 4.2). Unlike rank rows, memory is not written
in the order of steps: what leaves is free again only when `reclaim` says that no step can read it.
"""

import bisect
import dataclasses

import numpy as np

from lora_jax.adapters.allocator import AbstractAllocator, Placed, ResidencyStats
from lora_jax.adapters.weights import ExpertWeights


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """Place of an adapter's experts; `table` int32 [moe_layers, experts] is its slot's rows of the
    reroute tables (ExpertWeave, section 4.1: the ESFT expert map).
    """

    weights: ExpertWeights
    slot: int
    indices: dict[int, dict[int, int]]  # layer -> expert -> index in the layer's tensors
    table: np.ndarray

    @property
    def digest(self) -> str:
        return self.weights.digest

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """(layer, index) of every expert."""
        return tuple((n, i) for n, experts in self.indices.items() for i in experts.values())


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """Capacity of the expert tensors."""

    layers: tuple[int, ...]  # those with experts
    num_experts: int  # of the base, in a layer
    max_experts: int  # of one adapter, in a layer
    expert_bytes: int
    byte_budget: int | None = None  # of all adapters' experts; None: as many as there are indices
    extra: int | None = None  # indices of a layer for adapters; None: max_experts for every slot


class ExpertAllocator(AbstractAllocator[ExpertWeights, ExpertPlacement, ExpertPlacement]):
    """Host bookkeeping of ESFT slots and expert indices; one thread (the engine's) uses it."""

    def __init__(self, num_slots: int, sizes: ExpertSizes):
        super().__init__(num_slots)
        self._sizes = sizes
        self._extra = num_slots * sizes.max_experts if sizes.extra is None else sizes.extra
        if self._extra < sizes.max_experts:
            raise ValueError(
                f"{self._extra} indices do not hold an adapter of {sizes.max_experts} experts."
            )
        first = sizes.num_experts
        end = first + self._extra
        self._free_indices = {layer: list(range(first, end)) for layer in sizes.layers}  # sorted
        self._left: list[ExpertPlacement] = []  # not yet taken by take_left
        self._leaving: set[ExpertPlacement] = set()  # all that reclaim has not been called for

    def check_fits(self, weights: ExpertWeights) -> None:
        sizes = self._sizes
        for layer, experts in weights.experts.items():
            if len(experts) > sizes.max_experts:
                raise ValueError(
                    f"The adapter replaces {len(experts)} experts in layer {layer}; the server "
                    f"has room for {sizes.max_experts} in a layer (max_esft_experts)."
                )
        need = weights.num_experts * sizes.expert_bytes
        if sizes.byte_budget is not None and need > sizes.byte_budget:
            raise ValueError(
                f"The adapter's experts take {need} bytes; the server has {sizes.byte_budget} for "
                "all adapters' (esft_memory_bytes)."
            )

    def can_place(self, weights: ExpertWeights) -> bool:
        return weights.digest not in self._placed and bool(self._free_slots) and self._fits(weights)

    def make_room(self, weights: ExpertWeights) -> bool:
        """Return whether the adapter can be placed now; if not, evict an idle one, one at a time.

        Its place is free only after `reclaim`.
        """
        if weights.digest in self._placed:
            return False
        if not self.can_place(weights) and not self._leaving:
            self.evict_idle()
        return self.can_place(weights)

    def place(self, weights: ExpertWeights, *, pinned: bool = False) -> ExpertPlacement:
        if not self.can_place(weights):
            raise ValueError(f"There is no room for the adapter {weights.digest[:12]} now.")
        layers = self._sizes.layers
        table = np.tile(np.arange(self._sizes.num_experts, dtype=np.int32), (len(layers), 1))
        indices: dict[int, dict[int, int]] = {}
        for layer, experts in weights.experts.items():
            free = self._free_indices[layer]
            indices[layer] = dict(zip(experts, free, strict=False))
            del free[: len(experts)]
            for expert, index in indices[layer].items():
                table[layers.index(layer), expert] = index
        slot = self._free_slots.pop(0)
        placement = ExpertPlacement(weights, slot, indices, table)
        self._placed[weights.digest] = Placed(slot, placement, pinned)
        return placement

    def take_left(self) -> list[ExpertPlacement]:
        """Return, once, the adapters that have left since the last call; each wants `reclaim`."""
        left, self._left = self._left, []
        return left

    def reclaim(self, placement: ExpertPlacement) -> None:
        """Make slot and indices of an adapter that has left free: no step can read them."""
        self._leaving.remove(placement)
        for layer, index in placement.places:
            bisect.insort(self._free_indices[layer], index)
        self._return_slot(placement.slot)

    @property
    def num_leaving(self) -> int:
        """Adapters that have left and whose place is not free yet."""
        return len(self._leaving)

    def stats(self) -> ResidencyStats:
        total = self._extra * len(self._sizes.layers)
        budget = self._sizes.byte_budget
        return ResidencyStats(
            slots_used=len(self._placed) + len(self._leaving),
            slots_total=self.num_slots,
            bytes_used=self._bytes_held(),
            bytes_total=total * self._sizes.expert_bytes if budget is None else budget,
        )

    def check_integrity(self) -> None:
        super().check_integrity()
        held = [*(placed.room for placed in self._placed.values()), *self._leaving]
        slots = sorted([*self._free_slots, *(placement.slot for placement in held)])
        assert slots == list(range(self.num_slots)), "slots overlap or are lost"
        assert set(self._left) <= self._leaving, "left, but not leaving"
        first = self._sizes.num_experts
        for layer, free in self._free_indices.items():
            taken = [i for p in held for i in p.indices.get(layer, {}).values()]
            end = first + self._extra
            assert sorted([*free, *taken]) == list(range(first, end)), f"indices of layer {layer}"
            assert free == sorted(free), "free indices are not in order"

    def _fits(self, weights: ExpertWeights) -> bool:
        for layer, experts in weights.experts.items():
            if len(experts) > len(self._free_indices[layer]):
                return False
        budget = self._sizes.byte_budget
        need = weights.num_experts * self._sizes.expert_bytes
        return budget is None or self._bytes_held() + need <= budget

    def _bytes_held(self) -> int:
        held = [*(placed.room for placed in self._placed.values()), *self._leaving]
        return sum(p.weights.num_experts for p in held) * self._sizes.expert_bytes

    def _take_back(self, placed: Placed[ExpertPlacement]) -> None:
        self._left.append(placed.room)
        self._leaving.add(placed.room)
