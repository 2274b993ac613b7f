"""Linear maps, norms, embedding and MLP against numpy, and their bits in any company."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from lora_jax.nn.layers import Embedding, LayerNorm, Linear, Mlp, RMSNorm
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.grouped_matmul import silu_times

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def base_rows(num_rows: int, total: int) -> AdapterRouting:
    slots = jnp.full((total,), -1, jnp.int32)
    return AdapterRouting(jnp.int32(num_rows), slots, adapters=None, module_names=(), max_rank=0)


def check_bits(step: Callable, *arrays: np.ndarray) -> None:
    """Raise unless 64 rows at once and in parts of 1 and 8 give the same bits."""
    jitted = jax.jit(step)
    whole = np.asarray(jitted(*arrays))
    for rows in (1, 8):
        parts = [jitted(*(a[s : s + rows] for a in arrays)) for s in range(0, 64, rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", [33, 512])
def test_norms(size, dtype):
    rng = np.random.default_rng(0)
    x = (3 * rng.standard_normal((64, size)) + 1).astype(dtype)
    weight = rng.standard_normal(size).astype(dtype)
    wide, scale = x.astype(np.float64), weight.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    wants = {
        RMSNorm: wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * scale,
        LayerNorm: centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5) * scale,
    }
    tolerance = 1e-5 if dtype == F32 else 1e-2
    for kind, want in wants.items():
        norm = kind(size, 1e-5, dtype=dtype)
        norm.weight[...] = jnp.asarray(weight)
        got = norm(jnp.asarray(x))
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(F32), want, rtol=tolerance, atol=tolerance)
        check_bits(norm, x)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norm_of_a_sum_is_that_of_the_rounded_sum(kind):
    norm = kind(16, 1e-5, dtype=BF16)
    rng = np.random.default_rng(0)
    x, addend = (jnp.asarray(rng.standard_normal((5, 16)), BF16) for _ in range(2))
    total, normed = norm.of_sum(x, addend, jnp.int32(len(x)))
    np.testing.assert_array_equal(total, x + addend)
    np.testing.assert_array_equal(normed, norm(x + addend))


def test_norm_of_heads():
    norm = RMSNorm(4, 1e-5, dtype=F32)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 4)), F32)
    np.testing.assert_array_equal(norm(x)[2, 1], norm(x[2, 1][None])[0])


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias):
    rngs = nnx.Rngs(0)
    axes = ("heads", "embed")
    linear = Linear(6, 4, module="q_proj", layer=0, axes=axes, bias=bias, dtype=F32, rngs=rngs)
    if linear.bias is not None:
        linear.bias[...] = jnp.arange(4, dtype=F32)
    x = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
    got = np.asarray(linear(jnp.asarray(x), base_rows(5, 8)))
    want = x @ np.asarray(linear.weight[...]).T + (np.arange(4) if bias else 0)
    np.testing.assert_allclose(got[:5], want[:5], atol=1e-6)
    np.testing.assert_array_equal(got[5:], 0)


def test_embedding_and_tied_head():
    embed = Embedding(10, 6, dtype=F32, rngs=nnx.Rngs(0))
    table = np.asarray(embed.weight[...])
    tokens = jnp.asarray([9, 0, 3], jnp.int32)
    x = embed(tokens)
    np.testing.assert_array_equal(x, table[np.asarray(tokens)])
    np.testing.assert_allclose(embed.attend(x, base_rows(3, 3)), np.asarray(x) @ table.T, atol=1e-6)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_silu_times(dtype):
    rng = np.random.default_rng(0)
    gate, up = (4 * rng.standard_normal((2, 64, 96))).astype(dtype)
    want = gate.astype(float) / (1 + np.exp(-gate.astype(float))) * up.astype(float)
    got = silu_times(jnp.asarray(gate), jnp.asarray(up)).astype(F32)
    np.testing.assert_allclose(got, want, rtol=1e-5 if dtype == F32 else 5e-3, atol=1e-6)
    check_bits(silu_times, gate, up)


def test_mlp():
    mlp = Mlp(6, 10, layer=0, dtype=F32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    weights = [np.asarray(m.weight[...]) for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    gate, up = x @ weights[0].T, x @ weights[1].T
    want = (gate / (1 + np.exp(-gate)) * up) @ weights[2].T
    np.testing.assert_allclose(mlp(jnp.asarray(x), base_rows(3, 3)), want, atol=1e-6)


def test_parameters_say_where_they_lie():
    mlp = Mlp(6, 10, layer=0, bias=True, dtype=BF16, rngs=nnx.Rngs(0))
    assert mlp.gate_proj.weight.get_metadata()["logical_axes"] == ("mlp", "embed")
    assert mlp.gate_proj.bias.get_metadata()["logical_axes"] == ("mlp",)
    assert mlp.down_proj.weight.get_metadata()["logical_axes"] == ("embed", "mlp")
    assert mlp.down_proj.weight.dtype == ml_dtypes.bfloat16
