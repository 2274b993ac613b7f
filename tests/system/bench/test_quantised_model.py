"""Random weights of bench.quantised_model stand for about what they were made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.quantised_model import FORMATS

# Relative errors of formats over normal weights.
ERRORS = {"fp8": 0.03, "int4": 0.15, "nf4": 0.11, "mxfp4": 0.15, "gptq": 0.15}
ERRORS["awq"] = 0.4  # zero points of 7 to 9 in place of 8


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if place else ()) for place, n in enumerate(FORMATS)],
)
def test_weights_are_near_what_they_were_made_of(name):
    w = jax.random.normal(jax.random.key(0), (2, 8, 256), jnp.bfloat16)
    stored = FORMATS[name](w)
    stored.check(name)
    plain, wanted = (np.asarray(a, np.float32) for a in (stored.plain(), w))
    assert np.linalg.norm(plain - wanted) < ERRORS[name] * np.linalg.norm(wanted)
    assert stored.shape == w.shape
