"""Arguments that no implementation can take are named."""

import jax.numpy as jnp
import pytest

from lora_jax.ops import checks


def test_dtypes_must_be_equal_and_known():
    x, half = jnp.zeros(2), jnp.zeros(2, jnp.float16)
    checks.check_dtypes("op", x=x, bias=None)
    with pytest.raises(ValueError, match="x float16"):
        checks.check_dtypes("op", x=half)
    with pytest.raises(ValueError, match="x float32, y float16"):
        checks.check_dtypes("op", x=x, y=half)


def test_shapes_and_single_dtypes_are_named():
    checks.check_shapes("op", x=((2, 3), (2, 3)), bias=(None, (3,)))
    with pytest.raises(ValueError, match=r"op: x has shape \(2, 3\), expected \(2, 4\)"):
        checks.check_shapes("op", x=((2, 3), (2, 4)))
    with pytest.raises(ValueError, match=r"ids \(2,\) is float32, expected int32"):
        checks.check_dtype("op", jnp.int32, ids=jnp.zeros(2))
    assert checks.shape_of(None) is None
    assert checks.shape_of(jnp.zeros((2, 3))) == (2, 3)
