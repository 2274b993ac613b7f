"""The frame of a model: what is in its program, and what is not."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.drivers.model_driver import Driver, fill_slots, random_sites

from lora_jax.batch import ReadRows
from lora_jax.config import ModelConfig, from_hf
from lora_jax.models import build, model_class
from lora_jax.ops.cpu.build import available

LORA_CALL = "@lora_jax_lora_float32"
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def make_config(**changes) -> ModelConfig:
    mixture = {"num_local_experts": 64, "num_experts_per_tok": 4}
    return from_hf({"model_type": "mixtral", **SIZES, **mixture, **changes})


def lower_step(config: ModelConfig, num_tokens: int, adapters=None, max_rank=0):
    """Return the whole step for one prompt, traced over flat leaves as the engine does."""
    model = build(config)
    graphdef, state = nnx.split(model, graph=False)
    driver = Driver(model, config)
    batch = driver.batch([(0, 0, [1] * num_tokens)], [-1], num_tokens)
    leaves, treedef = jax.tree.flatten((state, batch, driver.new_cache(1), adapters))

    def step(*leaves):
        state, batch, cache, adapters = jax.tree.unflatten(treedef, leaves)
        merged = nnx.merge(graphdef, state)
        hidden, cache = merged(batch, cache, adapters, max_rank)
        slots = batch.token_to_slot
        logits = merged.logits(hidden, batch.num_tokens, slots, adapters, max_rank)
        return logits, jax.tree.leaves(cache)

    return jax.jit(step).lower(*leaves)


def test_no_trace_of_lora_without_adapters():
    if not available():
        pytest.skip("looks for the call of the C++ kernel")
    config = make_config()
    catalogue = model_class("mixtral").catalogue(config)
    slots = fill_slots(catalogue, [random_sites(catalogue, seed=0)])
    without, with_slots = lower_step(config, 4), lower_step(config, 4, slots, max_rank=5)
    assert LORA_CALL not in without.as_text()
    assert LORA_CALL in with_slots.as_text()


@pytest.mark.parametrize("num_tokens", [1, 128])
def test_no_float_reduction_is_left_to_xla(num_tokens):
    """Their order would depend on the bucket; top-k, sorts and integer sums do not matter."""
    if not available():
        pytest.skip("the portable ops are made of reductions")
    lowered = lower_step(make_config(), num_tokens)
    text = lowered.as_text()
    reduced = re.findall(r"stablehlo\.reduce\(.*\n?.*tensor<[0-9x]*(f32|bf16)>", text)
    assert reduced == []
    assert "dot_general" not in text
    assert "ynn_fusion" not in lowered.compile().as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_at_sizes_where_xla_begins_to_choose(dtype):
    """A prompt in a bucket of 128 with a neighbour, alone in 64, in chunks of 8, and one by one."""
    config = make_config()
    driver = Driver(build(config, dtype), config)
    rng = np.random.default_rng(0)
    prompt, other = rng.integers(0, 50, 60).tolist(), rng.integers(0, 50, 41).tolist()
    want = driver.run([other, prompt])[1]
    np.testing.assert_array_equal(driver.run([prompt])[0], want)
    np.testing.assert_array_equal(driver.run([prompt], chunk=8)[0], want)
    np.testing.assert_array_equal(driver.run([prompt[:20]], chunk=1)[0], want[:20])


@pytest.mark.parametrize("mixture", [False, True])
def test_states_of_the_rows_read_have_the_bits_of_all_and_the_last_layer_computes_no_more(mixture):
    config = make_config()
    catalogue = model_class("mixtral").catalogue(config)
    adapters = [random_sites(catalogue, seed=n) for n in (0, 1)]
    slots, model = fill_slots(catalogue, adapters, jnp.bfloat16), build(config, jnp.bfloat16)
    driver = Driver(model, config)
    batch = driver.batch([(0, 0, range(9)), (1, 3, range(5)), (2, 0, range(4))], [0, -1, 1], 20)
    if mixture:
        surplus = jnp.where(batch.token_to_slot == 1, 0, -1)
        batch = dataclasses.replace(batch, token_to_surplus_slot=surplus)
    rows = jnp.asarray([8, 13, 15, 17, 0, 0, 0], jnp.int32)

    def step(rows):
        read = None if rows is None else ReadRows(rows, jnp.int32(4))
        hidden, cache = model(batch, driver.new_cache(3), slots, 5, read=read)
        return hidden, jax.tree.leaves(cache)

    (want, pages), (got, same) = jax.jit(step)(None), jax.jit(step)(rows)
    assert got.shape == (7, 64)
    np.testing.assert_array_equal(got[:4], want[rows[:4]])
    for one, other in zip(pages, same, strict=True):
        np.testing.assert_array_equal(one, other)
    if available():  # the products of o, of the router and of the experts' rows
        text = jax.jit(step).lower(rows).as_text()
        assert [f"tensor<{7 * n}x64xbf16>" in text for n in (1, 4)] == [True, True]


def test_padding_rows_of_logits_are_zero():
    model = build(make_config(tie_word_embeddings=True))
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
    slots = jnp.full((4,), -1, jnp.int32)
    logits = model.logits(hidden, jnp.int32(2), slots, None, 0)
    assert logits.dtype == jnp.float32
    want = np.asarray(hidden) @ np.asarray(model.embed.weight[...]).T
    np.testing.assert_allclose(logits[:2], want[:2], atol=1e-5)
    np.testing.assert_array_equal(logits[2:], 0)


@pytest.mark.long
def test_a_bfloat16_model_runs_and_is_near_the_float32_one():
    config = make_config()
    wide = build(config, jnp.float32)
    graphdef, state = nnx.split(build(config, jnp.bfloat16), graph=False)
    values = dict(nnx.to_flat_state(nnx.split(wide, graph=False)[1]))
    narrow = [(p, v.replace(values[p][...].astype(v.dtype))) for p, v in nnx.to_flat_state(state)]
    model = nnx.merge(graphdef, nnx.from_flat_state(narrow))
    prompt = list(range(20))
    want = Driver(wide, config).run([prompt])[0]
    got = Driver(model, config).run([prompt])[0]
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_a_model_is_split_once_without_shared_references():
    leaves = jax.tree.leaves(nnx.split(build(make_config()), graph=False)[1])
    assert len({id(leaf) for leaf in leaves}) == len(leaves)
    assert len(leaves) == 2 * 10 + 3  # 4 attention, 2 norms, router, 3 expert matrices per layer
