"""A dense map with what follows it: the composed op, and the kernel on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda_backend.dense_matmul import check_support
from lora_jax.ops import dispatch
from lora_jax.ops.grouped_matmul import dense_matmul


def draw(rows: int, d_out: int, d_in: int, dtype: str):
    rng = np.random.default_rng(d_out)
    shapes = ((rows, d_in), (d_out, d_in), (d_out,), (rows, d_out))
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def oracle(x, w, bias, addend, count: int, *, gelu: bool) -> np.ndarray:
    """Return the op's formula in float32, rounded where the op rounds."""
    y = jnp.einsum("td,od->to", *(a.astype(jnp.float32) for a in (x, w)), precision="highest")
    y = (y + bias.astype(jnp.float32)[None]).astype(x.dtype)
    y = jax.nn.gelu(y.astype(jnp.float32), approximate=True).astype(x.dtype) if gelu else y
    y = y if addend is None else y.astype(jnp.float32) + addend.astype(jnp.float32)
    real = jnp.arange(len(x)) < count
    return np.asarray(jnp.where(real[:, None], y, jnp.zeros_like(y)), np.float32)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_is_a_map_then_gelu_then_a_sum(gelu, added):
    x, w, bias, addend = draw(9, 6, 4, "float32")
    given = (x, w, jnp.int32(7), bias, addend if added else None)
    want = oracle(x, w, bias, given[-1], 7, gelu=gelu)
    np.testing.assert_allclose(dense_matmul(*given, gelu=gelu), want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_names_the_sizes():
    x, w, bias, addend = draw(9, 6, 4, "float32")
    with pytest.raises(ValueError, match="addend has shape"):
        dense_matmul(x, w, jnp.int32(7), bias, addend[:4])
    with pytest.raises(ValueError, match="must be rank 2"):
        dense_matmul(x, w[None], jnp.int32(7), bias)
    with pytest.raises(ValueError, match=r"dense_matmul: bias has shape \(5,\), expected \(6,\)"):
        dense_matmul(x, w, jnp.int32(7), bias[:5])


def test_a_named_implementation_computes_the_map():
    x, w, bias, addend = draw(9, 6, 4, "float32")
    with dispatch.noted() as choices:
        dense_matmul(x, w, jnp.int32(7), bias, addend, implementation="reference")
    found = {op: [one["implementation"] for one in ones] for op, ones in choices.table().items()}
    assert found == {"dense_matmul": ["composed"], "grouped_matmul": ["reference"]}


def test_the_kernel_says_what_it_does_not_serve():
    with pytest.raises(NotImplementedError, match="takes bfloat16, not float32"):
        check_support(jnp.dtype(jnp.float32), 8, 8, 8)
    with pytest.raises(NotImplementedError, match="in steps of 8, not 8 rows of 12 and 8"):
        check_support(jnp.dtype(jnp.bfloat16), 8, 8, 12)


@pytest.mark.gpu
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("d_out", "d_in"), [(3456, 1152), (1152, 4304), (4304, 1152)])
def test_on_a_gpu_the_kernel_matches_and_depends_on_no_other_row(d_out, d_in, added, gelu):
    x, w, bias, addend = draw(1030, d_out, d_in, "bfloat16")
    w, x = w * 0.03, x.at[900:].set(jnp.nan)
    run = jax.jit(functools.partial(dense_matmul, gelu=gelu, implementation="cuda"))
    given = (x, w, jnp.int32(900), bias, addend if added else None)
    got = np.asarray(run(*given), np.float32)
    want = oracle(x, w, bias, given[-1], 900, gelu=gelu)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=3e-2)
    assert not got[900:].any()
    part = slice(200, 500)
    rest = (w, jnp.int32(300), bias, addend[part] if added else None)
    np.testing.assert_array_equal(np.asarray(run(x[part], *rest), np.float32), got[part])
