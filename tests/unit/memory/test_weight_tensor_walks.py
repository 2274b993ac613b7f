"""Weight tensors on random walks of loads, evictions and faults."""

import contextlib
import gc
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.cases.weight_tensor_cases import F32, PAGE, make_tensor, random_experts, read
from support.doubles.faulty_memory import FaultyMemory, Injected

from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.retirement import Retirement
from lora_jax.memory.virtual import OutOfPages
from lora_jax.memory.weight_tensor import WeightTensor


@pytest.mark.long
def test_a_thousand_cycles_leave_no_trace():
    tensor, memory = make_tensor()
    values = random_experts(2, 4)

    def cycle(count: int) -> None:
        for i in range(count):
            first = i % 30
            tensor.map(range(first, first + 2))
            tensor.write(first, values)
            tensor.unmap(range(first, first + 2))
            if i % 10 == 0:
                tensor.pool.trim()

    cycle(50)
    gc.collect()
    files, resident = len(os.listdir("/proc/self/fd")), resident_bytes()
    cycle(1000)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 6  # the pool's free pages
    assert resident_bytes() - resident < 8 << 20
    assert memory.usage().mapped == 0
    tensor.close()
    tensor.pool.trim()
    assert memory.usage().created == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGESIZE")


class Machine(RuleBasedStateMachine):
    """Adapters over two tensors of a layer, one pool: loads, evictions, faults, in any order.

    What is loaded keeps its bytes; what failed leaves nothing; books, pool and kernel agree.
    """

    SHAPES = ((30, 22, 64), (30, 10, 128))  # 1.375 and 1.25 pages an expert

    def __init__(self):
        super().__init__()
        self.memory = FaultyMemory(HostMemory("none"))
        self.pool = PagePool(self.memory, page_bytes=PAGE, budget_bytes=50 * PAGE)
        self.tensors = [WeightTensor(self.pool, shape, F32) for shape in self.SHAPES]
        self.free = set(range(4, 30))
        self.retirement = Retirement()
        self.adapters: dict[int, tuple[range, list[np.ndarray]]] = {}
        self.retiring: list[range] = []
        self.steps = 0

    @initialize()
    def load_base(self):
        for tensor in self.tensors:
            tensor.map(range(4))

    @rule(count=st.integers(1, 6))
    def load(self, count):
        """Map and write both tensors; whatever fails, take back what was mapped."""
        starts = [i for i in self.free if self.free.issuperset(range(i, i + count))]
        if not starts:
            return
        run = range(min(starts), min(starts) + count)
        self.free -= set(run)
        values = [random_experts(count, self.steps, shape) for shape in self.SHAPES]
        mapped = []
        try:
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.map(run)
                mapped.append(tensor)
                tensor.write(run.start, value)
        except (OutOfPages, Injected):
            self.memory.heal()
            for tensor in mapped:
                tensor.unmap(run)
            self.free |= set(run)
        else:
            self.adapters[run.start] = (run, values)

    @rule(
        operation=st.sampled_from(["create_page", "map_run", "write", "unmap"]),
        after=st.integers(0, 8),
    )
    def arm(self, operation, after):
        """Let something fail, in this step or in a later one."""
        self.memory.fail(operation, after)

    @rule(which=st.integers(0, 99), delay=st.integers(0, 3))
    def evict(self, which, delay):
        """Unmap when the step that may still read has completed."""
        if not self.adapters:
            return
        run, _ = self.adapters.pop(sorted(self.adapters)[which % len(self.adapters)])
        self.retiring.append(run)
        self.retirement.defer(self.steps + delay, lambda: self._free(run))

    def _free(self, run: range) -> None:
        self.retiring.remove(run)
        self.free |= set(run)
        for tensor in self.tensors:
            with contextlib.suppress(Injected):
                tensor.unmap(run)

    @rule()
    def complete_step(self):
        self.retirement.completed(self.steps)
        self.steps += 1

    @rule()
    def trim(self):
        self.pool.trim()
        assert self.pool.stats().free == 0

    @rule(which=st.integers(0, 99))
    def rewrite(self, which):
        """New values for an adapter that is there, in place."""
        if not self.adapters:
            return
        run, values = self.adapters[sorted(self.adapters)[which % len(self.adapters)]]
        fresh = random_experts(len(run), self.steps + 1000, self.SHAPES[0])
        with contextlib.suppress(Injected):
            self.tensors[0].write(run.start, fresh)
            values[0] = fresh

    @invariant()
    def books_agree(self):
        self.pool.check_integrity()
        wanted = set(range(4)).union(*(run for run, _ in self.adapters.values()), *self.retiring)
        for tensor in self.tensors:
            tensor.check_integrity()
            assert set(tensor.mapped) in (wanted, set())
        stats, usage = self.pool.stats(), self.memory.usage()
        mapped = sum(tensor.bytes_mapped for tensor in self.tensors)
        assert mapped == stats.in_use * PAGE == usage.mapped
        assert stats.created * PAGE == usage.created <= 50 * PAGE

    @invariant()
    def bytes_are_kept(self):
        for run, values in self.adapters.values():
            for tensor, value in zip(self.tensors, values, strict=True):
                for index, expert in zip(run, value, strict=True):
                    np.testing.assert_array_equal(read(tensor, index), expert)

    def teardown(self):
        self.memory.heal()
        for tensor in self.tensors:
            tensor.close()
        self.pool.trim()
        usage = self.memory.usage()
        assert (usage.created, usage.mapped) == (0, 0)


HEALTH = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
Machine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=40, deadline=None, suppress_health_check=HEALTH
)
TestMachine = Machine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestMachineForTenThousandSteps(Machine.TestCase):
    """The same machine, 10,000 steps."""

    settings = settings(
        max_examples=101, stateful_step_count=100, deadline=None, suppress_health_check=HEALTH
    )
