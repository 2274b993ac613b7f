"""Runs of expert indices: tight, reused, and what they save in pages (ExpertWeave, Table 1)."""

import numpy as np
import pytest
from faulty_memory import counting_memory
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.memory import cases
from lora_jax.memory.cases import BASE, E_MAX, EXPERT_BYTES, LAYERS, PAGE, PROJECTIONS, TABLE_1
from lora_jax.memory.expert_ranges import ExpertRanges
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import OutOfPages
from lora_jax.memory.weight_tensor import WeightTensor

COUNTS = list(cases.table_1_counts().values())
TRUE = sum(total for _, total in TABLE_1.values())


class Weave:
    """The tensors of a model, or of its first layers, over pages that are counted, not filled."""

    def __init__(self, layers: int = LAYERS):
        memory, self.calls = counting_memory(PAGE)
        self.pool = PagePool(memory, page_bytes=PAGE, budget_bytes=100 << 30)
        capacity = len(TABLE_1) * E_MAX
        self.ranges = [ExpertRanges(BASE, capacity) for _ in range(layers)]
        self.tensors = [
            [
                WeightTensor(self.pool, (BASE + capacity, *p), np.dtype(np.float16))
                for p in PROJECTIONS
            ]
            for _ in range(layers)
        ]
        for tensors in self.tensors:
            for tensor in tensors:
                tensor.map(range(BASE))
        self.base_bytes = self.bytes

    @property
    def bytes(self) -> int:
        return self.pool.stats().in_use * PAGE

    def load(self, counts: np.ndarray) -> list[range | None]:
        runs = [self.ranges[i].allocate(int(c)) if c else None for i, c in enumerate(counts)]
        for tensors, run in zip(self.tensors, runs, strict=True):
            for tensor in tensors if run else ():
                tensor.map(run)
        return runs

    def unload(self, runs: list[range | None]) -> None:
        for ranges, tensors, run in zip(self.ranges, self.tensors, runs, strict=True):
            for tensor in tensors if run else ():
                tensor.unmap(run)
            if run:
                ranges.free(run)

    def overhead(self, true_experts: float) -> float:
        """Bytes of the adapters' pages against their experts' own."""
        return (self.bytes - self.base_bytes) / (true_experts * EXPERT_BYTES)


def test_ten_adapters_cost_at_most_three_percent_over_their_own_bytes():
    weave = Weave()
    for counts in COUNTS:
        weave.load(counts)
    ours = weave.overhead(TRUE)
    assert ours <= 1.01
    with_base = weave.bytes / ((LAYERS * BASE + TRUE) * EXPERT_BYTES)
    assert 1.0 <= with_base <= ours


@pytest.mark.parametrize(("most", "factor"), [("own", 1.551), ("global", 1.996)])
def test_padding_costs_what_the_paper_counts(most, factor):
    weave = Weave(layers=2)  # all layers are alike
    for own, _ in TABLE_1.values():
        weave.load(np.full(2, own if most == "own" else E_MAX))
    assert weave.overhead(TRUE * 2 / LAYERS) == pytest.approx(factor, rel=0.005)


def test_fragmentation_stays_low_while_adapters_come_and_go():
    """80 random changes; then all ten are there again, in whatever holes there were."""
    weave, rng = Weave(layers=4), np.random.default_rng(1)
    counts = [c[:4] for c in COUNTS]
    loaded: dict[int, list[range | None]] = {}
    worst = 1.0
    for _ in range(80):
        which = int(rng.integers(len(counts)))
        if which in loaded:
            weave.unload(loaded.pop(which))
        else:
            loaded[which] = weave.load(counts[which])
        if len(loaded) >= 5:
            worst = max(worst, weave.overhead(sum(int(counts[i].sum()) for i in loaded)))
    assert worst <= 1.05
    for which in range(len(counts)):
        if which not in loaded:
            loaded[which] = weave.load(counts[which])
    assert weave.overhead(sum(int(c.sum()) for c in counts)) <= 1.03
    for runs in loaded.values():
        weave.unload(runs)
    assert weave.bytes == weave.base_bytes


def test_runs_lie_next_to_each_other_from_the_base_on():
    ranges = ExpertRanges(64, 20)
    assert [ranges.allocate(n) for n in (3, 5, 1)] == [range(64, 67), range(67, 72), range(72, 73)]
    assert ranges.num_free == 11


def test_the_smallest_hole_that_fits_is_taken():
    ranges = ExpertRanges(0, 20)
    runs = [ranges.allocate(n) for n in (4, 1, 2, 1, 3, 1)]
    for run in (runs[0], runs[2], runs[4]):
        ranges.free(run)
    assert ranges.allocate(2) == runs[2]
    assert ranges.allocate(3) == runs[4]
    assert ranges.allocate(1).start == 0
    assert ranges.allocate(3) == range(1, 4)


def test_freed_neighbours_become_one_hole():
    ranges = ExpertRanges(2, 6)
    first, second, third = (ranges.allocate(2) for _ in range(3))
    ranges.free(first)
    ranges.free(third)
    with pytest.raises(OutOfPages, match="4 of 6 are, at most 2 in a row"):
        ranges.allocate(3)
    ranges.free(second)
    assert ranges.allocate(6) == range(2, 8)


def test_what_was_not_given_out_so_is_not_taken_back():
    ranges = ExpertRanges(0, 10)
    run = ranges.allocate(4)
    for wrong in (range(0, 3), range(1, 4), range(4, 6)):
        with pytest.raises(ValueError, match="not given out"):
            ranges.free(wrong)
    ranges.free(run)
    with pytest.raises(ValueError, match="not given out"):
        ranges.free(run)


def test_bad_sizes_are_refused():
    for first, capacity in ((-1, 4), (4, -1)):
        with pytest.raises(ValueError, match="must not be negative"):
            ExpertRanges(first, capacity)
    with pytest.raises(ValueError, match="cannot allocate 0"):
        ExpertRanges(0, 4).allocate(0)
    with pytest.raises(OutOfPages):
        ExpertRanges(3, 0).allocate(1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_runs_never_overlap_whatever_happens(steps):
    ranges, model = ExpertRanges(5, 24), []
    for take, number in steps:
        if take:
            try:
                model.append(ranges.allocate(number))
            except OutOfPages:
                free = set(range(5, 29)) - {i for run in model for i in run}
                assert not any(free >= set(range(i, i + number)) for i in free)
        elif model:
            ranges.free(model.pop(number % len(model)))
        ranges.check_integrity()
        assert sorted(ranges.taken, key=lambda r: r.start) == sorted(model, key=lambda r: r.start)
