"""One rank's deltas against numpy, and its table against what it was told."""

import dataclasses
import time

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.rank import RankSizes, ServerRank
from serving.lora_server.shards import (
    ATTENTION_MODULES,
    EXPERT_MODULES,
    SITES,
    ShardLayout,
    shard_part,
)
from serving.lora_server.transport.shapes import DOWN, GATE_UP, OUT, QKV
from serving.runtime.compile_counter import CompileCounter

EXPERTS, LAYERS = 4, 2
CATALOGUE = adapter_cases.moe(experts=EXPERTS, layers=LAYERS)
LAYOUT = ShardLayout(
    ServerLayout(AdapterShape(2, LAYERS, EXPERTS, 1), ep=2, pp=1), tuple(range(LAYERS))
)
SHARD = LAYOUT.shard(1)  # experts 2 and 3 of both layers
SIZES = RankSizes(num_adapters=2, max_rank=3, max_rows=20)


def adapter(seed: int, rank: int = 3, layers: int = LAYERS) -> AdapterWeights:
    rng, sites = np.random.default_rng(seed), {}
    for name in EXPERT_MODULES + ATTENTION_MODULES:
        module = CATALOGUE.modules[name]
        for layer in range(layers):
            a, b = (
                rng.standard_normal((module.num_experts or 1, rank, w)).astype(np.float32)
                for w in (module.d_in, module.d_out)
            )
            sites[name, layer] = SiteWeights(a, b, 0.5)
    report = AdapterReport(AdapterKind.LORA, "f", f"{seed:064d}", {}, 0, 0, {}, rank, 0, None, None)
    return AdapterWeights(sites, report)


def load(rank: ServerRank, number: int, weights: AdapterWeights) -> None:
    rank.start_load(number, shard_part(weights, SHARD))
    while rank.advance(1) is None:
        assert rank.slots_of(np.full(1, number, np.int32), 8) is None, "used before it was written"
    while rank.is_loading:
        rank.advance(1)


@pytest.fixture(scope="module")
def rank():
    made = ServerRank(CATALOGUE, SHARD, SIZES, jnp.dtype("float32"))
    made.warm_up()
    return made


@pytest.fixture(autouse=True)
def _empty(request, rank):
    yield
    for number in rank.held:
        rank.unload(number)
    assert not rank.is_loading
    rank.check_integrity()
    assert not rank.slots.entries.any()


def deltas(rank, site, layer, numbers, experts, seed=0):
    """Return x and the rank's answer for rows of these adapters."""
    bucket = rank.bucket(len(numbers))
    x = np.full((bucket, rank.width_in(site)), np.nan, np.float32)  # leftovers of a slot
    x[: len(numbers)] = np.random.default_rng(seed).standard_normal((len(numbers), x.shape[1]))
    slots = rank.slots_of(np.asarray(numbers, np.int32), bucket)
    row_to_expert = np.full(bucket, 99, np.int32)
    row_to_expert[: len(experts)] = experts
    found = rank.deltas(site, layer, x, slots, row_to_expert)
    return x, [np.asarray(delta)[: len(numbers)] for delta in found]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("site", [GATE_UP, DOWN])
def test_deltas_are_those_of_the_merged_matrices(rank, site, layer):
    held = {2: adapter(1), 5: adapter(2, rank=2)}
    for number, weights in held.items():
        load(rank, number, weights)
    numbers, experts = [5, 2, 2, 5, 2] * 2, [2, 2, 3, 3, 3] * 2
    x, found = deltas(rank, site, layer, numbers, experts)
    for name, got in zip(SITES[site], found, strict=True):
        for row, (number, expert) in enumerate(zip(numbers, experts, strict=True)):
            delta = adapter_cases.site_delta(held[number].sites[name, layer])[expert]
            np.testing.assert_allclose(got[row], delta @ x[row], rtol=2e-5, atol=2e-5)


def test_attention_is_where_a_layers_first_expert_is():
    layout = dataclasses.replace(LAYOUT, attention=True)
    first, second = (ServerRank(CATALOGUE, layout.shard(r), SIZES, jnp.float32) for r in range(2))
    assert (first.sites, second.sites) == ((GATE_UP, DOWN, QKV, OUT), (GATE_UP, DOWN))
    weights = adapter(4)
    first.start_load(1, shard_part(weights, layout.shard(0)))
    while first.is_loading:
        first.advance(8)
    for site in (QKV, OUT):
        x, found = deltas(first, site, 1, [1, 1], [0, 0])
        assert first.widths_out(site) == tuple(delta.shape[1] for delta in found)
        for name, got in zip(SITES[site], found, strict=True):
            (delta,) = adapter_cases.site_delta(weights.sites[name, 1])
            np.testing.assert_allclose(got, x[:2] @ delta.T, rtol=2e-5, atol=2e-5)


def test_an_adapter_without_the_layer_adds_nothing(rank):
    load(rank, 0, adapter(3, layers=1))
    for delta in deltas(rank, GATE_UP, 1, [0, 0], [2, 3])[1]:
        assert not delta.any()
    assert all(delta.any() for delta in deltas(rank, GATE_UP, 0, [0, 0], [2, 3])[1])


def test_a_number_is_known_from_its_load_to_its_end(rank):
    numbers = np.asarray([3, 3], np.int32)
    assert rank.slots_of(numbers, 8) is None
    load(rank, 3, adapter(1))
    np.testing.assert_array_equal(rank.slots_of(numbers, 8) >= 0, [True] * 2 + [False] * 6)
    assert rank.slots_of(np.asarray([3, 1], np.int32), 8) is None  # one of them is not held
    assert rank.slots_of(np.asarray([-1], np.int32), 8) is None
    rank.unload(3)
    load(rank, 5, adapter(2))  # the same place
    assert rank.slots_of(numbers, 8) is None
    assert rank.slots_of(np.asarray([5], np.int32), 8) is not None


def test_what_cannot_be_held_changes_nothing(rank):
    load(rank, 0, adapter(1))
    cases = {
        "place of adapter number 2": (2, adapter(2)),
        "place of adapter number -1": (-1, adapter(2)),
        "has a slot already": (1, adapter(1)),
        "needs 84 rank rows": (1, adapter(2, rank=7)),
    }
    for message, (number, weights) in cases.items():
        with pytest.raises(ValueError, match=message):
            rank.start_load(number, shard_part(weights, SHARD))
        assert rank.held == {0: adapter(1).digest}
        rank.check_integrity()


def test_a_load_can_be_taken_back(rank):
    rank.start_load(1, shard_part(adapter(1), SHARD))
    assert rank.advance(1) is None
    rank.unload(1)
    assert not rank.is_loading
    load(rank, 1, adapter(1))
    rank.unload(7)  # never held
    rank.start_load(2, shard_part(adapter(2), SHARD))
    while rank.advance(1) is None:
        pass
    assert rank.is_loading
    rank.unload(2)  # one of its layers is there
    assert rank.held == {1: adapter(1).digest}


def test_no_copy_of_a_load_taken_back_is_under_way(rank, monkeypatch):
    copier = LateCopier(late=1_000_000)
    monkeypatch.setattr(rank, "_copier", copier)
    rank.start_load(1, shard_part(adapter(1), SHARD))
    while not copier.begun:
        rank.advance(1)
    rank.unload(1)
    assert not copier.begun  # another's rows may come to their place now


class FailingCopier(LateCopier):
    """Copies so many times; after that the device takes nothing."""

    def __init__(self, copies):
        super().__init__()
        self.left = copies

    def begin_write_into(self, array, offset, data):
        if not self.left:
            raise OSError("the device took no copy")
        self.left -= 1
        super().begin_write_into(array, offset, data)


def advance(rank):
    """Go on until nothing is loaded: another thread makes the chunks ready."""
    end = time.monotonic() + 30
    while rank.is_loading:
        rank.advance(1)
        assert time.monotonic() < end, "a load does not end"


@pytest.mark.parametrize("copies", [0, 1])
def test_a_load_whose_copy_fails_is_dropped_alone(rank, monkeypatch, copies):
    load(rank, 0, adapter(0))
    monkeypatch.setattr(rank, "_copier", FailingCopier(copies))
    rank.start_load(1, shard_part(adapter(1), SHARD))
    advance(rank)
    assert rank.take_failures() == [(1, "the device took no copy")]
    assert not rank.take_failures()
    assert not rank.is_loading
    assert rank.held == {0: adapter(0).digest}
    rank.check_integrity()
    monkeypatch.setattr(rank, "_copier", LateCopier())
    load(rank, 1, adapter(1))  # its place is free
    assert rank.held == {0: adapter(0).digest, 1: adapter(1).digest}


def test_a_copy_that_fails_behind_a_layer_in_use_ends_the_rank(rank, monkeypatch):
    copier = FailingCopier(copies=1000)
    monkeypatch.setattr(rank, "_copier", copier)
    rank.start_load(1, shard_part(adapter(1), SHARD))
    while rank.advance(1) is None:
        pass
    copier.left = 0
    with pytest.raises(LoadFailed, match="took no copy"):
        advance(rank)
    rank.unload(1)


def test_a_layer_may_be_used_before_the_next_has_come(rank):
    weights, numbers = adapter(1), np.asarray([0], np.int32)
    load(rank, 0, weights)
    want = [deltas(rank, GATE_UP, layer, [0], [2])[1] for layer in range(LAYERS)]
    rank.unload(0)
    rank.start_load(2, shard_part(weights, SHARD))
    while rank.advance(1) is None:
        pass
    numbers += 2
    assert rank.is_loading
    assert not rank.must_wait(numbers, 0)
    assert rank.must_wait(numbers, 1)
    np.testing.assert_array_equal(deltas(rank, GATE_UP, 0, [2], [2])[1], want[0])
    assert not np.any(deltas(rank, GATE_UP, 1, [2], [2])[1])  # nothing half written shows
    rank.check_integrity()
    while rank.must_wait(numbers, 1):
        assert rank.advance(1) is None  # it is told of once
    np.testing.assert_array_equal(deltas(rank, GATE_UP, 1, [2], [2])[1], want[1])
    assert not rank.is_loading


def test_without_layerwise_loading_the_last_layer_is_waited_for(rank, monkeypatch):
    monkeypatch.setattr(rank, "sizes", dataclasses.replace(rank.sizes, layerwise=False))
    rank.start_load(3, shard_part(adapter(0), SHARD))
    while rank.advance(1) is None:
        assert 3 not in rank.held
    assert not rank.is_loading
    assert 3 in rank.held
    rank.unload(3)


def test_kernels_may_be_named(rank):
    load(rank, 1, adapter(0))
    want = deltas(rank, GATE_UP, 1, [1, 1], [2, 3])
    rank._implementation = "reference"
    got = deltas(rank, GATE_UP, 1, [1, 1], [2, 3])
    rank._implementation = None
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a[:2], b[:2], rtol=1e-5, atol=1e-5)


def test_nothing_compiles_after_warm_up(rank):
    counter = CompileCounter()
    counter.watch_this_thread()
    load(rank, 0, adapter(1))
    for rows in (1, 8, 9, 20):
        for site in rank.sites:
            deltas(rank, site, 1, [0] * rows, [2] * rows)
    rank.unload(0)
    counter.close()
    assert counter.count == 0


def test_buckets(rank):
    assert RankSizes(1, 1, 300).buckets == (8, 32, 128, 300)
    assert RankSizes(1, 1, 5).buckets == (5,)
    assert [rank.bucket(n) for n in (1, 8, 9, 20)] == [8, 8, 20, 20]
    with pytest.raises(ValueError, match="21 rows; at most 20"):
        rank.bucket(21)
