"""A step over several devices gives what one device does, in either of its forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from lora_jax.kv_cache import init_cache, pages_sharding
from lora_jax.models import load
from lora_jax.models.split import make_split
from lora_jax.nn import layers, moe
from serving.api.sampling import Sampling
from serving.steps.compiled_step import CompiledStep
from serving.steps.device_state import admit, init_row_state, pack_row
from serving.steps.operands import Operands
from serving.steps.split_step import StepSplit, weight_specs
from serving.steps.step import NUM_TOKENS, SAMPLES, SLOT, START, TABLE_ROWS, StepSizes

SHAPE = TinyShape(layers=1)
SIZES = StepSizes(max_seqs=4, max_len=32, page_size=4, num_pages=20, max_logit_rows=8, max_rank=4)
SAMPLING = Sampling(temperature=0.9, top_p=0.9, logprobs=2, presence_penalty=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint.write_model(folder, SHAPE)
    return folder


def make_step(folder, devices, *, in_place=False, vocab=SHAPE.vocab):
    """A step of the model over so many devices, and its operands."""
    config = load(folder)[1]
    split = make_split(config, devices)
    model, _ = load(folder, split=split)
    shape = type(model).kv_shape(config)
    pages = pages_sharding(shape, split)
    over = None if pages is None else StepSplit(split, pages.spec)
    step = CompiledStep(model, SIZES, None, vocab, in_place=in_place, split=over)
    cache = init_cache(shape, SIZES.num_pages, SIZES.page_size, jnp.dtype(jnp.float32), split)
    cache = jax.device_put(cache, step.sharding) if split is None else cache
    state = jax.device_put(init_row_state(SIZES.max_seqs, SIZES.max_len), step.sharding)
    return step, Operands(cache, state, None, None, None)


@pytest.fixture(scope="module")
def lowered(folder):
    """The program of a step over so many devices, and its operands."""

    @functools.cache
    def lower(devices):
        step, operands = make_step(folder, devices)
        return step.trace(operands, table_of(0, 1), 8, lora=True).lower(), operands

    return lower


def table_of(start, count):
    table = np.zeros((TABLE_ROWS, SIZES.max_seqs), np.int32)
    table[START, :2], table[NUM_TOKENS, :2], table[SAMPLES, :2] = start, count, 1
    table[SLOT] = -1
    return table


def decode(step, operands, *, in_parts=False):
    """Samples of two sequences over a prompt of 3 and then 4 steps, and the addresses of memory."""
    state = operands.state
    for row in (0, 1):
        packed = pack_row(SAMPLING, (5 + row, 6, 7), 3, row, (), SIZES.max_len, SHAPE.vocab)
        state = admit(state, row, packed)
    tables = np.arange(4 * SIZES.max_pages, dtype=np.int32).reshape(4, -1)
    step.inputs.set_pages(tables % SIZES.num_pages)
    operands, samples, seen = operands._replace(state=state), [], set()
    for start, count in ((0, 3), *((place, 1) for place in range(3, 7))):
        if in_parts:
            cache, forwarded, _ = step.forward(operands, table_of(start, count), 8)
            packed = step.new_masks().packed
            state, sampled = step.sample(operands.state, forwarded, packed, 8)
        else:
            cache, state, sampled, _ = step.run(operands, table_of(start, count), 8, lora=True)
        operands = operands._replace(cache=cache, state=state)
        samples.append([np.asarray(leaf) for leaf in jax.tree.leaves(sampled)])
        parts = [leaf.addressable_shards for leaf in jax.tree.leaves((cache, state))]
        seen.add(tuple(p.data.unsafe_buffer_pointer() for shards in parts for p in shards))
    return samples, seen


# Not in place, as on a CPU: a whole engine in engine/test_devices.py, and the test below.
@pytest.mark.long  # engine/test_devices.py has the samples of an engine
@pytest.mark.parametrize("in_place", [False, True])
def test_samples_and_log_probabilities_are_those_of_one_device(folder, in_place):
    want, _ = decode(*make_step(folder, 1, in_place=in_place))
    got, addresses = decode(*make_step(folder, 2, in_place=in_place))
    for mine, others in zip(got, want, strict=True):
        for one, other in zip(mine, others, strict=True):
            np.testing.assert_array_equal(one, other)
    assert len({tuple(token_ids[:2].tolist()) for token_ids, *_ in got}) > 1
    if in_place:
        assert len(addresses) == 1


def test_forward_and_sample_apart_give_those_of_one_device(folder):
    want, _ = decode(*make_step(folder, 1))
    got, _ = decode(*make_step(folder, 2), in_parts=True)
    for mine, others in zip(got, want, strict=True):
        for one, other in zip(mine, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_every_step_in_place_runs_one_program_and_copies_results_of_one_device(folder):
    step, operands = make_step(folder, 2, in_place=True)
    _, addresses = decode(step, operands)
    assert step._step._cache_size() == 1
    assert len(addresses) == 1
    rows = SIZES.logit_rows(8)
    held = step._results[rows]
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(held)]
    copies = jax.tree.leaves(step._copied(held))
    assert {leaf.devices() == {jax.devices()[0]} for leaf in copies} == {True}
    assert len(jax.tree.leaves(held)[0].devices()) == 2
    for copy, want in zip(copies, before, strict=True):
        np.testing.assert_array_equal(copy, want)


@pytest.mark.parametrize("devices", [1, 2])
def test_of_the_state_a_step_gives_back_the_history_alone(lowered, devices):
    """Every result is an array that the host makes, with a buffer on each device."""
    program, operands = lowered(devices)
    cache, history, sampled, status = program.out_tree.children()
    assert cache.num_leaves == len(jax.tree.leaves(operands.cache))
    assert (history.num_leaves, sampled.num_leaves, status.num_leaves) == (1, 5, 0)


def test_one_device_has_no_trace_of_a_split(lowered):
    """Its program has no exchange and one partition; that of two has the exchanges of section 2."""
    plain = lowered(1)[0].as_text()
    assert "all_gather" not in plain
    assert "mhlo.num_partitions = 1 " in plain
    split = lowered(2)[0].as_text()
    # The embedding, o and down before and after in one layer, the logits.
    assert split.count("stablehlo.all_gather") == 1 + 4 * SHAPE.layers + 1
    assert "all_reduce" not in split


def test_code_for_splits_leaves_nothing_in_the_program_of_one_device(tmp_path, monkeypatch):
    """It is the program that is there when exchanges return what they are given."""
    shape = TinyShape(layers=1, experts=4)
    tiny_checkpoint.write_model(tmp_path, shape)

    def program():
        step, operands = make_step(tmp_path, 1, vocab=shape.vocab)
        return step.trace(operands, table_of(0, 1), 8, lora=True).lower().as_text()

    plain = program()
    for module, name in ((layers, "gather"), (moe, "gather")):
        monkeypatch.setattr(module, name, lambda x, split: x)
    of_layers = "pick", "local_index", "gather_rows", "swap_rows"
    of_experts = "gather_rows", "take_owned", "own_rows", "num_own_rows", "shares_rows"
    for module, names in ((layers, of_layers), (moe, of_experts)):
        for name in names:
            monkeypatch.delattr(module, name)
    assert program() == plain
    for word in ("all_gather", "all_to_all", "manual_computation"):
        assert word not in plain


def test_weights_lie_in_parts_and_pools_come_first(folder):
    step, operands = make_step(folder, 2)
    specs = weight_specs(step._leaves)
    assert PartitionSpec() in specs
    assert all(spec in (PartitionSpec(), PartitionSpec("device", None)) for spec in specs)
    heads = jax.tree.leaves(operands.cache)[0].addressable_shards[0].data.shape[2]
    assert heads == SHAPE.kv_heads // 2
