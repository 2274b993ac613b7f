"""The choice of experts against plain numpy, and its bits in any company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.config import MoeConfig
from lora_jax.ops.choose_experts import choose_experts

BASE = MoeConfig(num_experts=12, top_k=3, intermediate_size=20, layers=(0,))
KINDS = {
    "plain": BASE,
    "normalised": dataclasses.replace(BASE, topk_norm=1.0),
    "normalised by the 2-norm": dataclasses.replace(BASE, topk_norm=2.0),
    "scaled": dataclasses.replace(BASE, weight_scale=16.0),
    "softmax over the chosen": dataclasses.replace(BASE, softmax_first=False),
    "grouped": dataclasses.replace(BASE, num_groups=4, topk_groups=2),
    "one expert": dataclasses.replace(BASE, top_k=1, topk_norm=1.0),
}


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_choice(logits: np.ndarray, moe: MoeConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights and ids of one token's experts, as the models' own code has it."""
    scores = softmax(logits.astype(float))
    allowed = scores.copy()
    if moe.num_groups > 1:
        groups = scores.reshape(moe.num_groups, -1)
        worst = np.argsort(-groups.max(-1))[moe.topk_groups :]
        allowed.reshape(moe.num_groups, -1)[worst] = 0
    ids = np.argsort(-allowed)[: moe.top_k]
    weights = scores[ids]
    if not moe.softmax_first:
        weights = softmax(logits[ids].astype(float))
    if moe.topk_norm is not None:
        weights = weights / np.linalg.norm(weights, moe.topk_norm)
    return weights * moe.weight_scale, ids


@pytest.mark.parametrize("name", KINDS)
def test_choice(name):
    logits = 3 * np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)
    choose = jax.jit(lambda x: choose_experts(x, KINDS[name]))
    weights, ids = choose(logits)
    for token, row in enumerate(logits):
        want, want_ids = numpy_choice(row, KINDS[name])
        np.testing.assert_array_equal(ids[token], want_ids)
        np.testing.assert_allclose(weights[token], want, rtol=1e-5)
    for rows in (1, 8):
        parts = [choose(logits[s : s + rows])[0] for s in range(0, 64, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), weights)


@pytest.mark.parametrize("experts", [64, 128])
def test_bits_of_the_choice_among_many_experts(experts):
    """64 x 64 is where XLA begins to hand reductions to a library."""
    moe = dataclasses.replace(BASE, num_experts=experts, top_k=8, topk_norm=1.0)
    logits = 3 * np.random.default_rng(0).standard_normal((64, experts)).astype(np.float32)
    choose = jax.jit(lambda x: choose_experts(x, moe)[0])
    parts = [choose(logits[s : s + 8]) for s in range(0, 64, 8)]
    np.testing.assert_array_equal(np.concatenate(parts), choose(logits))


@pytest.mark.parametrize("name", KINDS)
def test_portable_is_the_meaning(name):
    logits = 3 * np.random.default_rng(1).standard_normal((17, 12)).astype(np.float32)
    got, want = (
        choose_experts(jnp.asarray(logits), KINDS[name], implementation=implementation)
        for implementation in ("xla", "reference")
    )
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("name", KINDS)
def test_zeros_of_either_sign_are_equal(name, implementation):
    """The kernel compares numbers; a sort would put 0.0 before -0.0."""
    logits = jnp.full((1, 12), -0.0).at[0, 5:].set(0.0).at[0, 11].set(-1.0)
    weights, ids = choose_experts(logits, KINDS[name], implementation=implementation)
    assert ids[0].tolist() == list(range(KINDS[name].top_k))
    same, _ = choose_experts(logits + 7, KINDS[name], implementation=implementation)
    np.testing.assert_array_equal(weights, same)
