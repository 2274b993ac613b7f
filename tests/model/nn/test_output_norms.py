"""Norms of adapted outputs against the matrices themselves, plain and quantised."""

import dataclasses

import numpy as np
import pytest
from support.cases.brought_cases import FIXTURES

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.gains import with_gains
from lora_jax.models.loader import load
from lora_jax.nn.output_norms import OutputNorms
from lora_jax.ops.grouped_matmul.weights import plain


@pytest.fixture(scope="module")
def case():
    model, config = load(FIXTURES / "qwen2" / "model", dtype=np.dtype("float32"))
    norms = OutputNorms(model, 4)
    catalogue = with_gains(model.catalogue(config), norms.modules)
    return model, norms, peft_format.read(FIXTURES / "qwen2" / "dora_bias", catalogue)


def test_gains_become_rows(case):
    model, norms, weights = case
    norms.warm_up()
    got = norms.resolve(weights)
    attn = model.layers[1].attn
    for name, linear in (("q_proj", attn.q_proj), ("o_proj", attn.o_proj)):
        site, raw = weights.sites[name, 1], weights.gains[name, 1]
        w = np.asarray(plain(linear.weight[...]), np.float64)
        adapted = w + site.scaling * site.b[0].T.astype(np.float64) @ site.a[0]
        factor = raw.magnitude / np.linalg.norm(adapted, axis=1)
        gain, shift = got.sites[f"{name}.gain", 1].a[0]
        np.testing.assert_allclose(1 + gain, factor, rtol=1e-5)
        if name == "q_proj":
            want = raw.bias - factor * np.asarray(linear.bias[...])
            np.testing.assert_allclose(shift, want, rtol=1e-4, atol=1e-5)
        else:
            assert not shift.any()
    assert got.digest == weights.digest


def test_a_plain_adapter_is_itself(case):
    _, norms, weights = case
    without = dataclasses.replace(weights, gains={})
    assert norms.resolve(without) is without


def test_modules_are_the_linear_maps_and_a_tied_head(case):
    _, norms, _ = case
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert norms.modules == attention | {"gate_proj", "up_proj", "down_proj", "lm_head"}
