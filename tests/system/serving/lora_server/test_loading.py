"""The order of the writes: every layer whole before its entries show, lowest first."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases
from support.doubles.late_copier import LateCopier

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.row_copies import pin_matrices
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from serving.lora_server.loading import LayerwiseLoad

LAYERS, EXPERTS = 4, 2
CATALOGUE = adapter_cases.moe(experts=EXPERTS, layers=LAYERS)
SPEC = size_slots(CATALOGUE, 2, 3, 4)


def weights_of(sites) -> AdapterWeights:
    report = AdapterReport(AdapterKind.LORA, "f", "d" * 64, {}, 0, 0, {}, 3, 0, None, None)
    return AdapterWeights(sites, report)


def site(rng, d_in=16, d_out=12, a=None) -> SiteWeights:
    a = rng.standard_normal((EXPERTS, 3, d_in)).astype("f4") if a is None else a
    return SiteWeights(a, rng.standard_normal((EXPERTS, 3, d_out)).astype("f4"), 2.0)


def placed(weights, copier=None):
    allocator = SlotAllocator(CATALOGUE, SPEC.num_slots, SPEC.rows)
    slots = init_slots(CATALOGUE, SPEC, jnp.dtype("float32"))
    return LayerwiseLoad(allocator.place(weights), weights, slots, copier), slots


def check_layer(slots, weights, layer):
    """Every entry of a layer leads to the adapter's own rows."""
    names = CATALOGUE.module_names
    for index, name in enumerate(names):
        a_row, b_row, rank, *_ = np.asarray(slots.entries[index, layer, 0])
        wanted = weights.sites.get((name, layer))
        if wanted is None:
            assert rank == 0
            continue
        assert rank == wanted.rank
        for row, matrix in ((a_row, wanted.a), (b_row, wanted.b)):
            flat = matrix.reshape(-1, matrix.shape[2])
            pool = np.asarray(slots.pools[str(matrix.shape[2])])
            np.testing.assert_array_equal(pool[row : row + len(flat)], flat)


@pytest.mark.parametrize("copier", [None, LateCopier()])
@pytest.mark.parametrize("shared", [False, True])
def test_layers_come_whole_and_in_order(shared, copier):
    rng = np.random.default_rng(0)
    one = rng.standard_normal((1, 3, 16)).astype("f4") if shared else None
    weights = weights_of(
        {
            ("experts.gate_proj", 1): site(rng, a=one),
            ("experts.up_proj", 1): site(rng, a=one),
            ("experts.down_proj", 1): site(rng, 12, 16),
            ("experts.up_proj", 3): site(rng, a=one),
        }
    )
    load, slots = placed(weights, copier)
    assert load.num_ready == 0
    seen = []
    while not load.done:
        before = load.remaining
        slots = load.advance(slots, 1)
        assert load.remaining == before - 1
        if load.num_ready not in seen:
            seen.append(load.num_ready)
        for layer in range(load.num_ready):
            check_layer(slots, weights, layer)
        assert not np.asarray(slots.entries)[:, load.num_ready :].any()
    assert seen == [0, 3, 4]  # layers 0 to 2 are there when 1 is


@pytest.mark.parametrize("copier", [None, LateCopier()])
def test_matrices_that_are_one_write_of_the_placement_come_by_layer(copier):
    rng = np.random.default_rng(0)
    given = weights_of({("experts.up_proj", layer): site(rng) for layer in range(LAYERS)})
    weights = pin_matrices(given, LateCopier())  # in one block, as a device's host copies them
    allocator = SlotAllocator(CATALOGUE, SPEC.num_slots, SPEC.rows)
    slots = init_slots(CATALOGUE, SPEC, jnp.dtype("float32"))
    placement = allocator.place(weights)
    assert [len(writes) for writes in placement.writes.values()] == [1, 1]
    load, seen = LayerwiseLoad(placement, weights, slots, copier), []
    while not load.done:
        slots = load.advance(slots, 1)
        seen.append(load.num_ready)
        for layer in range(load.num_ready):
            check_layer(slots, given, layer)
        assert not np.asarray(slots.entries)[:, load.num_ready :].any()
    assert {1, 2} < {*seen}  # the first two layers come alone


def test_an_adapter_without_matrices_is_there_at_once():
    load, slots = placed(weights_of({}))
    assert load.remaining == 1
    slots = load.advance(slots, 5)
    assert load.done
    assert load.num_ready == LAYERS
    assert not np.asarray(slots.entries).any()


def test_one_call_may_write_it_all():
    rng = np.random.default_rng(0)
    weights = weights_of({("experts.up_proj", layer): site(rng) for layer in range(LAYERS)})
    load, slots = placed(weights)
    slots = load.advance(slots, load.remaining)
    assert load.done
    for layer in range(LAYERS):
        check_layer(slots, weights, layer)


def test_a_layer_waits_for_its_copies_and_the_next_for_it():
    rng = np.random.default_rng(0)
    weights = weights_of({("experts.up_proj", layer): site(rng) for layer in range(LAYERS)})
    load, slots = placed(weights, LateCopier(late=4))
    seen = []
    while not load.done:
        slots = load.advance(slots, 1000)
        seen.append(load.num_ready)
        for layer in range(load.num_ready):
            check_layer(slots, weights, layer)
    assert seen == sorted(seen)
    assert {*seen} == {0, 1, 2, 4}  # later ones several at a time
