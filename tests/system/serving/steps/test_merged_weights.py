"""The shadow: each map is what the op's reference says, and no switch leaves a trace."""

import random

import jax
import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.adapter_cases import site_delta, weights
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.models import load
from serving.api.request import Merged, StepPlan
from serving.steps.merged_weights import MODES, MergedWeights, dense_map_bytes, dense_maps

SHAPE = TinyShape()
RANKS = (3, 1, 4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A model, slots with three adapters, and the adapters."""
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint.write_model(folder, SHAPE)
    model, config = load(folder)
    catalogue = model.catalogue(config)
    names = {"q_proj", "o_proj", "down_proj"}
    adapters = [weights(catalogue, rank, seed, names=names) for seed, rank in enumerate(RANKS)]
    spec = size_slots(catalogue, len(adapters), max(RANKS), 4)
    allocator = SlotAllocator(catalogue, spec.num_slots, spec.rows)
    slots = init_slots(catalogue, spec, np.dtype("float32"))
    for adapter in adapters:
        slots = LoraLoadJob(allocator.place(adapter), slots).advance(slots, 1000)
        allocator.finish_loading(adapter.digest)
    places = [allocator.slot_of(adapter.digest) for adapter in adapters]
    return model, slots, adapters, places


def leaves_of(merged):
    return [np.asarray(leaf) for leaf in merged.operands.leaves]


def merge_one(merged, loaded, number):
    _, slots, adapters, places = loaded
    plan = StepPlan((), merged=Merged(adapters[number].digest, places[number], f"a{number}"))
    merged.prepare(plan, slots)
    return leaves_of(merged)


def test_every_map_gets_its_adapter_and_nothing_else_changes(loaded):
    model, slots, adapters, _ = loaded
    merged = MergedWeights(model, max(RANKS))
    merged.warm_up(slots)
    plain = [np.asarray(leaf) for leaf in merged._plain]
    maps = {m.leaf: m for m in dense_maps(model)}
    assert len(maps) == 7 * SHAPE.layers
    assert merged.num_bytes == dense_map_bytes(model) == sum(plain[leaf].nbytes for leaf in maps)
    done = merge_one(merged, loaded, 0)
    for leaf, (before, after) in enumerate(zip(plain, done, strict=True)):
        site = (
            adapters[0].sites.get((maps[leaf].module, maps[leaf].layer)) if leaf in maps else None
        )
        if site is None:
            np.testing.assert_array_equal(after, before)
        else:
            np.testing.assert_allclose(after, before + site_delta(site)[0], rtol=1e-5, atol=1e-5)
            assert (after != before).any()


def test_steps_are_counted_by_mode_and_an_adapter_that_stays_costs_nothing(loaded):
    merged = MergedWeights(loaded[0], max(RANKS))
    merged.warm_up(loaded[1])
    merge_one(merged, loaded, 1)
    before = merged.operands.leaves
    merge_one(merged, loaded, 1)
    merged.prepare(StepPlan(()), loaded[1])
    assert all(a is b for a, b in zip(before, merged.operands.leaves, strict=True))
    assert merged.num_switches == 1
    assert merged.steps == dict(zip(MODES, (1, 2, 0), strict=True))


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_random_switches_leave_the_plain_weights_and_no_trace(loaded, count):
    model, slots, *_ = loaded
    plain = [np.asarray(leaf) for leaf in jax.tree.leaves(MergedWeights(model, 4)._plain)]
    merged, rng = MergedWeights(model, max(RANKS)), random.Random(0)
    merged.warm_up(slots)
    first = [merge_one(merged, loaded, number) for number in range(len(RANKS))]
    for _ in range(count):
        number = rng.randrange(len(RANKS))
        got = merge_one(merged, loaded, number)
    for a, b in zip(got, first[number], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(merged._plain, plain, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def test_norms_are_those_of_the_plain_maps(loaded):
    model = loaded[0]
    norms = MergedWeights(model, 4).norms
    want = np.linalg.norm(np.asarray(model.layers[0].attn.q_proj.weight[...]))
    assert norms["q_proj", 0] == pytest.approx(float(want), rel=1e-5)
    assert len(norms) == 7 * SHAPE.layers
