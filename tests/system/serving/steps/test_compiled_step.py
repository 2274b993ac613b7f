"""Steps whose memory stays where it is give what others do."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.kv_cache import init_cache
from lora_jax.models import load
from serving.api.sampling import Sampling
from serving.lora_server.client import RemoteTable
from serving.steps.compiled_step import CompiledStep
from serving.steps.device_state import admit, init_row_state, pack_row
from serving.steps.operands import Operands
from serving.steps.step import NUM_TOKENS, SAMPLES, SLOT, START, TABLE_ROWS, StepSizes

SHAPE = TinyShape()
SAMPLING = Sampling(temperature=0.9, top_p=0.9, logprobs=2, presence_penalty=0.5)
SIZES = StepSizes(max_seqs=4, max_len=32, page_size=4, num_pages=20, max_logit_rows=8, max_rank=4)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint.write_model(folder, SHAPE)
    return load(folder)


@pytest.fixture(scope="module")
def decoded(loaded):
    """`decode` of the model; a way that two tests ask for is compiled once."""
    return functools.cache(functools.partial(decode, loaded))


def pointers(tree):
    """Return the addresses of a tree's arrays that lie on the device."""
    placed = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return [leaf.unsafe_buffer_pointer() for leaf in placed]


def new_memory(model, config, sharding):
    """Return cache and state as a runner has them: committed, or steps compile twice."""
    shape, wide = type(model).kv_shape(config), jnp.dtype(jnp.float32)
    cache = init_cache(shape, SIZES.num_pages, SIZES.page_size, wide)
    return jax.device_put((cache, init_row_state(SIZES.max_seqs, SIZES.max_len)), sharding)


def decode(loaded, sampling, *, in_place, in_parts=False):
    """Return the samples of two sequences over a prompt of 3 and then 5 steps, and addresses.

    With `in_parts` each step is two programs.
    """
    model, config = loaded
    step = CompiledStep(model, SIZES, None, SHAPE.vocab, in_place=in_place)
    cache, state = new_memory(model, config, step.sharding)
    for row in (0, 1):
        packed = pack_row(sampling, (5 + row, 6, 7), 3, row, (), SIZES.max_len, SHAPE.vocab)
        state = admit(state, row, packed)
    tables = np.arange(4 * SIZES.max_pages, dtype=np.int32).reshape(4, -1) % SIZES.num_pages
    step.inputs.set_pages(tables)
    tables[:] = 0  # the step has its own copy
    samples, seen = [], set()
    for start, count in ((0, 3), *((place, 1) for place in range(3, 8))):
        table = np.zeros((TABLE_ROWS, SIZES.max_seqs), np.int32)
        table[START, :2], table[NUM_TOKENS, :2], table[SAMPLES, :2] = start, count, 1
        table[SLOT] = -1
        operands = Operands(cache, state, None, None, None)
        if in_parts:
            if start == 0:
                step.lower_parts(operands, table, 8)
            cache, forwarded, status = step.forward(operands, table, 8)
            state, sampled = step.sample(state, forwarded, step.new_masks().packed, 8)
        else:
            cache, state, sampled, status = step.run(operands, table, 8, lora=True)
        assert status is None
        samples.append(sampled)
        inputs = (step.inputs.table, step.inputs.pages, step.inputs.masks)
        stays = (*inputs, step._results, cache, state)
        seen.add(tuple(pointers((*stays, step._forwarded))))
    return samples, seen


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(temperature=0.0), marks=pytest.mark.slow),
        SAMPLING,
    ],
)
def test_a_step_in_place_gives_what_another_does_at_the_same_addresses(decoded, sampling):
    want, _ = decoded(sampling, in_place=False)
    samples, addresses = decoded(sampling, in_place=True)
    assert len(addresses) == 1
    for got, its in zip(samples, want, strict=True):
        for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(its), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=2e-6)
    # Results of earlier steps are copies: later steps leave them alone.
    assert len({tuple(np.asarray(s.token_ids)[:2].tolist()) for s in samples}) > 1


@pytest.mark.parametrize("in_place", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_in_two_programs_gives_what_one_does(decoded, in_place):
    want, _ = decoded(SAMPLING, in_place=in_place)
    samples, addresses = decoded(SAMPLING, in_place=in_place, in_parts=True)
    for got, its in zip(samples, want, strict=True):
        np.testing.assert_array_equal(got.token_ids, its.token_ids)
        np.testing.assert_array_equal(got.logprobs, its.logprobs)
    if in_place:
        assert len(addresses) == 1


class Link:
    """A way to two ranks whose status is what their table says; nothing is ever sent."""

    client, has_local = SimpleNamespace(servers=2), False

    def start(self, table, split):
        assert split is None
        self.table = table
        return self

    def has(self, module, layer):
        return False

    def exchange(self, modules, layer, row_to_slot, row_to_expert, num_rows):
        raise AssertionError("a dense model has no experts")

    def status(self):
        return self.table.slot_to_number[:2] + self.table.version


@pytest.mark.long
def test_a_servers_status_and_numbers_stay_at_their_addresses(loaded):
    model, config = loaded
    step = CompiledStep(model, SIZES, Link(), SHAPE.vocab, in_place=True)
    cache, state = new_memory(model, config, step.sharding)
    table = None
    found, seen = [], set()
    for version in range(4):
        new = np.arange(4, dtype=np.int32), np.int32(10 * version)
        table = step.inputs.replace(table, new)
        operands = Operands(cache, state, None, None, RemoteTable(*table))
        plan = np.zeros((TABLE_ROWS, SIZES.max_seqs), np.int32)
        cache, state, _, status = step.run(operands, plan, 8, lora=True)
        found.append(np.asarray(status))
        if version:  # on a CPU the first values may lie where the host has them
            seen.add(tuple(pointers((table, step._status))))
    np.testing.assert_array_equal(found, [[0, 1], [10, 11], [20, 21], [30, 31]])
    assert len(seen) == 1
    operands = operands._replace(cache=cache, state=state)
    *_, status = step.trace(operands, plan, 8, lora=False).lower().out_tree.children()
    assert status == jax.tree.structure(None)
