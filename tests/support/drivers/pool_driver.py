"""A scheduler driver over one real pool of pages: host memory, rank rows, extents, no model.

The fake device runs steps late. When it does, all KV pages of the step must have memory, and the
rows of its adapters the bytes of their weights.
"""

import collections
import random

import numpy as np
from support.cases import adapter_cases
from support.doubles.fake_device import FakeDevice
from support.doubles.residency_doubles import device
from support.drivers.scheduler_driver import EOS, VOCAB, Driver

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.slots import SlotsSpec, init_slots, rows_per_adapter
from lora_jax.kv_cache import KVShape
from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.pooled import PooledPages, PooledRows
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.page_room import PageRoom
from serving.loading.pooled_allocator import PooledSlotAllocator
from serving.loading.pooled_residency import PooledLoraResidency
from serving.scheduling.pages.exchange import PageExchange
from serving.scheduling.pages.extents import PageExtents
from serving.scheduling.scheduler import Scheduler, SchedulerLimits

PAGE, FLOAT = 4096, np.dtype(np.float32)
WIDE = {"hidden": 64, "inner": 48, "layers": 2}
EXTENT = 2  # KV pages of 2 layers, 4 tokens, K and V of 64 float32: 2 pages of the pool
SHAPE = KVShape(num_layers=2, num_kv_heads=1, k_dim=64, v_dim=64)


class Entry:
    """What the loader reads of a registry's entry."""

    def __init__(self, name: str, weights):
        self.name, self.weights, self.digest = name, weights, weights.digest
        self.kind, self.pinned = AdapterKind.LORA, False


class PoolDriver(Driver):
    """Adapters a to h of ranks 2 to 8; all weights are in host memory."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        pages: int,
        num_slots: int = 6,
        memory: HostMemory | None = None,
        overrun: int = 0,
    ):
        """With an overrun rows and KV pages are cleared when they come, as on a GPU."""
        self._longest = -(-limits.max_model_len // limits.page_size)
        self.catalogue = adapter_cases.llama(**WIDE)
        self.weights = {
            name: adapter_cases.weights(self.catalogue, 2 + n % 4 * 2, seed=n, digest=name)
            for n, name in enumerate("abcdefgh")
        }
        memory = memory or HostMemory("none")
        self.pool = PagePool(memory, page_bytes=PAGE, budget_bytes=pages * PAGE)
        most = pages - -(-self._longest // EXTENT) * 2
        rows = {w: most * PAGE // (4 * w) for w in rows_per_adapter(self.catalogue, 8)}
        of_kv = SHAPE, limits.num_pages, limits.page_size, FLOAT
        kv = PooledPages(self.pool, *of_kv, cleared=overrun > 0)
        self.room = PageRoom(self.pool, kv, PooledRows(self.pool, rows, FLOAT, overrun=overrun))
        self.exchange = PageExchange(self.pool, kept=self.pool.stats().in_use)
        how = self.catalogue, num_slots, rows, 4, self.room, self.exchange, most
        self.allocator = PooledSlotAllocator(*how)
        self.loader = AdapterLoader(self.allocator, self.room.jobs(self.allocator))
        self.residency = PooledLoraResidency(self.loader, self.room)
        self.arrays = device()
        spec = SlotsSpec(num_slots, rows)
        row_arrays = self.room.rows.arrays
        self.arrays.slots = init_slots(self.catalogue, spec, FLOAT, rows=row_arrays)
        self.device = Device(self, limits.num_pages, limits.page_size, VOCAB, Slots(self))
        self.scheduler = Scheduler(
            limits, adapters=self.residency, eos_token_ids=[EOS], extents=self._extents
        )
        self.now = 0.0
        self.in_flight: collections.deque = collections.deque()
        self.scores = collections.defaultdict(list)
        self.ended, self.plans, self._num_requests = [], [], 0
        self.dispatched = self.read = 0
        self.most_kv = self.most_adapters = 0

    def add(self, prompt, *, adapter: str = "", **more):
        made = super().add(prompt, adapter=adapter, **more)
        if adapter:
            self.residency.retain(Entry(adapter, self.weights[adapter]))
        return made

    def step(self, depth: int = 1):
        """As Driver.step; then loads advance and what has left is freed."""
        before = len(self.plans)
        num_ended = len(self.ended)
        self.residency.tick = lambda: None
        plan = super().step(depth)
        self.dispatched += len(self.plans) - before
        self.residency.advance(
            self.arrays, 2, self.dispatched, self.dispatched - len(self.in_flight)
        )
        for sequence in self.ended[num_ended:]:
            if sequence.request.adapter and not self._lives(sequence):
                self.residency.drop(sequence.request.adapter_digest)
        self._count()
        return plan

    def complete_one(self) -> None:
        _, captured = self.in_flight[0]
        for one in captured:
            self._check_memory(one)
        super().complete_one()

    def _lives(self, sequence) -> bool:
        return sequence.request.request_id in self.scheduler._requests

    def _extents(self, cache) -> PageExtents:
        how = {"extent": EXTENT, "extent_pages": 2, "least": self._longest}
        made = PageExtents(cache, self.exchange, self.room, **how)
        self.room.mapped_pages = lambda: made.mapped
        self.extents = made
        return made

    def _check_memory(self, captured) -> None:
        """What the step reads and writes must be there when it runs."""
        assert set(captured.pages) <= set(self.extents.mapped), "a step over pages without memory"
        if captured.adapter:
            # An adapter whose sequence was aborted may be leaving while a step still reads it.
            there = self.allocator._placed.get(captured.adapter)
            places = [there] if there else self.allocator._leaving
            assert any(self._lies_in(captured.adapter, placed.room) for placed in places), (
                "rows have other bytes than the adapter"
            )

    def _lies_in(self, name: str, rows) -> bool:
        """Return whether these rows have the adapter's bytes."""
        found, wanted = {}, {}
        for width, start, count in rows:
            tensor = self.room.rows._tensors[width]
            where = tensor.address + start * tensor.expert_bytes
            read = tensor.pool.memory.read(where, count * tensor.expert_bytes)
            found[width] = found.get(width, b"") + read
        for matrix in self.weights[name].matrices():
            width = matrix.shape[-1]
            wanted[width] = wanted.get(width, b"") + matrix.tobytes()
        return found == wanted

    def _count(self) -> None:
        self.most_kv = max(self.most_kv, self.extents.num_present)
        self.most_adapters = max(self.most_adapters, len(self.allocator.resident()))

    def check(self) -> None:
        """Assert that books and memory agree; nothing may be loading."""
        self.scheduler.check_integrity()
        self.allocator.check_integrity()
        self.room.check_integrity()
        assert self.pool.stats().created <= self.pool.stats().budget


class Device(FakeDevice):
    """A fake device to which steps are sent as the engine's loop does."""

    def __init__(self, driver: PoolDriver, *how):
        super().__init__(*how)
        self._driver = driver

    def capture(self, plan):
        driver = self._driver
        driver.residency.prepare(driver.arrays, driver.dispatched)
        assert not getattr(driver.pool.memory, "begun", ()), "a step before its pages are zeros"
        return super().capture(plan)


class Slots:
    """Adapters by slot, as the allocator has them."""

    def __init__(self, driver: PoolDriver):
        self._driver = driver

    def __getitem__(self, slot: int) -> str:
        allocator = self._driver.allocator
        return next(d for d in allocator.resident() if allocator.slot_of(d) == slot)


def shifting(rng: random.Random, phase: str) -> dict:
    """Return a request of a phase: many adapters, long contexts, or both."""
    long = phase == "long" or (phase == "both" and rng.random() < 0.5)
    adapters = "ab" if phase == "long" else "abcdefgh"
    stem = [rng.randrange(3)] * (rng.choice([20, 24, 28]) if long else 3)
    return {
        "prompt": stem + [rng.randrange(20) for _ in range(rng.randrange(1, 6))],
        "adapter": rng.choice(["", *adapters]),
        "max_tokens": rng.randrange(1, 10),
        "ignore_eos": True,
        "seed": rng.randrange(100),
    }
