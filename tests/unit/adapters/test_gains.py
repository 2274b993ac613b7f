"""Gains of outputs: the names of their modules, their rows, and what these compute."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.gains import gain_name, gain_site, is_gain, with_gains
from lora_jax.adapters.weights import RawGain

PLAIN = cases.llama()
CATALOGUE = with_gains(PLAIN, ["q_proj", "lm_head", "no_such_module"])
RNG = np.random.default_rng(0)
VECTOR = RNG.normal(size=16).astype("f4")


def test_a_gain_computes_what_peft_computes():
    y, lora, b, trained = (RNG.normal(size=16).astype("f4") for _ in range(4))
    norm = RNG.uniform(0.5, 2, 16).astype("f4")
    site = gain_site(RawGain(magnitude=VECTOR, bias=trained), norm, b, "q")
    gain, shift = site.a[0]
    total = y + b + lora  # what the step has before
    want = VECTOR / norm * (y + lora) + trained
    np.testing.assert_allclose(total + (gain * total + shift), want, rtol=1e-5, atol=1e-5)
    gain, shift = gain_site(RawGain(magnitude=VECTOR), norm, b, "q").a[0]
    want = VECTOR / norm * (y + lora) + b
    np.testing.assert_allclose(total + (gain * total + shift), want, rtol=1e-5, atol=1e-5)


def test_a_gain_that_the_base_does_not_allow():
    with pytest.raises(ValueError, match="no bias at q, and the adapter trained one"):
        gain_site(RawGain(bias=VECTOR), None, None, "q")
    with pytest.raises(ValueError, match="DoRA at q: an output of the adapted weights has norm 0"):
        gain_site(RawGain(magnitude=VECTOR), np.zeros(16, "f4"), None, "q")


def test_names():
    assert gain_name("q_proj") == "q_proj.gain"
    assert [is_gain(n) for n in CATALOGUE.module_names if "q_proj" in n] == [False, True]
    assert CATALOGUE.modules["lm_head.gain"].d_out == PLAIN.modules["lm_head"].d_out
