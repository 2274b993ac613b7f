"""A loader of LoRA adapters over real slots, a few rows wide."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from support.cases import adapter_cases as cases

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.slots import init_slots, size_slots
from serving.loading.adapter_loader import AdapterLoader

CATALOGUE = cases.llama(hidden=8, inner=6, vocab=10)
RANK, SLOTS = 4, 2


def entry(name, *, pinned=False, seed=None):
    weights = cases.weights(CATALOGUE, RANK, seed or ord(name), f"digest-{name}-{seed}")
    return AdapterEntry(name, AdapterKind.LORA, weights.digest, 1, weights, pinned, name)


class Case:
    """A loader over two slots, its device slots, and the seconds its loads took."""

    def __init__(self, num_slots=SLOTS, more_slots=0):
        spec = size_slots(CATALOGUE, num_slots, RANK, 4)
        spec = dataclasses.replace(spec, num_slots=num_slots + more_slots)
        self.allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows)
        self.slots = init_slots(CATALOGUE, spec, jnp.dtype(jnp.float32))
        self.seconds = []
        self.now = 0.0
        self.loader = AdapterLoader(
            self.allocator, on_loaded=self.seconds.append, clock=lambda: self.now
        )

    def advance(self, chunks=1000):
        self.slots = self.loader.advance(self.slots, chunks)

    def bring(self, one):
        """Make an adapter resident through a request, and return its slot."""
        self.loader.retain(one)
        assert self.loader.acquire(one.digest) is None
        self.advance()
        slot = self.loader.acquire(one.digest)
        assert slot is not None
        return slot

    def leave(self, one):
        self.loader.release(one.digest)
        self.loader.drop(one.digest)

    def scaling(self, slot):
        return np.asarray(self.slots.scaling)[:, :, slot]
