"""silu(gate) * up: its meaning, its extremes, and the same bits in every company."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.models.quantised.forms import NF4
from lora_jax.ops import dispatch
from lora_jax.ops import silu_times as silu_module
from lora_jax.ops.dispatch import ANY, Implementation, Op
from lora_jax.ops.grouped_matmul import gated_matmul, joined_matmul
from lora_jax.ops.grouped_matmul.weights import CodedWeight
from lora_jax.ops.silu_times import gated_maps, silu_times


def some_rows(dtype: str, real: int, rows: int = 9, width: int = 1003):
    """Rows of which `real` are not padding; their elements are no whole number of vectors."""
    rng = np.random.default_rng(0)
    live = (np.arange(rows) < real)[:, None]
    gate, up = (np.where(live, 6 * rng.standard_normal((rows, width)), 0) for _ in range(2))
    return jnp.asarray(gate, dtype), jnp.asarray(up, dtype), jnp.int32(real)


@pytest.mark.parametrize("implementation", ["ffi", "xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_implementations_match_float64_and_depend_on_no_other_row(implementation, dtype):
    gate, up, real = some_rows(dtype, 7)
    got = silu_times(gate, up, real, implementation=implementation)
    wide, other = (np.asarray(a, np.float64) for a in (gate, up))
    want = wide / (1 + np.exp(-wide)) * other
    np.testing.assert_allclose(np.asarray(got, np.float32), want, **TOLERANCE[dtype])
    np.testing.assert_array_equal(np.asarray(got, np.float32)[7:], 0)
    one = slice(6, 7)
    alone = silu_times(gate[one], up[one], jnp.int32(1), implementation=implementation)
    np.testing.assert_array_equal(np.asarray(alone, np.float32), np.asarray(got, np.float32)[one])


def test_extremes_on_a_cpu():
    gate = jnp.asarray([[-np.inf, -1e30, -100, -0.0, 0, 1e-30, 100, 1e30, np.nan]], jnp.float32)
    got = np.asarray(silu_times(gate, jnp.ones_like(gate), jnp.int32(1), implementation="ffi"))[0]
    np.testing.assert_array_equal(got[3:8], np.array([0, 0, 5e-31, 100, 1e30], np.float32))
    assert np.abs(got[1:3]).max() < 1e-20
    assert np.isnan(got[8])
    assert np.isnan(got[0]) or got[0] == 0


def test_a_cpu_takes_the_kernel_of_its_own():
    with dispatch.noted() as choices:
        silu_times(*some_rows("float32", 3))
    assert [one["implementation"] for one in choices.table()["silu_times"]] == ["ffi"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_maps_have_the_bits_of_the_maps_and_the_activation(dtype):
    rng = np.random.default_rng(0)
    x, *weights = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((5, 24), *[(40, 24)] * 2))
    real = jnp.int32(3)
    want = silu_times(*joined_matmul(x, weights, real, (None, None)), real)
    got = gated_maps(x, *weights, real)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_experts_products_by_xla_meet_in_the_silu_of_the_platform(monkeypatch):
    """A GPU's silu is not XLA's, and a LoRA Server's results go through it."""
    x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((2, 40, 64), jnp.bfloat16)
    own = Op(
        "silu_of_experts",
        (Implementation("xla", ANY, lambda gate, up, real: gate + real.astype(gate.dtype)),),
    )
    monkeypatch.setattr(silu_module, "SILU_OF_EXPERTS", own)
    got = gated_matmul(x, w, w, jnp.array([2, 0], jnp.int32), implementation="xla")
    np.testing.assert_array_equal(np.asarray(got, np.float32)[:2], 66)


def test_gated_maps_name_a_weight_of_another_shape():
    x, w = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    with pytest.raises(Exception, match="w_up"):  # by the annotation in tests, or the message
        gated_maps(x, w, jnp.zeros((5, 8)), jnp.int32(2))


def test_the_experts_kernels_leave_a_dense_layers_quantised_weights():
    """They are multiplied side by side, in tiles of more rows."""
    codes, scales = jnp.zeros((40, 32), jnp.uint8), jnp.ones((40, 1), jnp.float32)
    w = CodedWeight(codes, scales, None, NF4, jnp.dtype(jnp.bfloat16))
    x, real = jnp.zeros((2, 64), jnp.bfloat16), jnp.int32(2)
    for name in ("cuda", "pallas_gpu"):
        with pytest.raises(
            dispatch.Declined, match=f"{name}: takes plain weights, not CodedWeight"
        ):
            gated_maps(x, w, w, real, implementation=name)


@pytest.mark.parametrize("there", [False, None])
def test_mosaics_kernel_leaves_dense_layers_where_silu_alone_is_xlas(monkeypatch, there):
    """A program with adapters takes silu alone: a row without one would have other bits there."""

    def load_kernels():
        if there is None:
            raise dispatch.Declined("no backend")
        return there

    module = importlib.import_module("lora_jax.ops.silu_times.gated_maps")
    monkeypatch.setattr(module, "backend_kernel", lambda *_: load_kernels)
    x, w, real = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16), jnp.int32(2)
    with pytest.raises(dispatch.Declined, match="silu alone would have other bits"):
        gated_maps(x, w, w, real, implementation="pallas_gpu")


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("op", [silu_times, silu_module.silu_of_experts])
def test_gate_and_up_of_other_shapes_are_named(op):
    for shape in ((3, 9), (2, 8)):
        with pytest.raises(ValueError, match=r": up has shape .*, expected \(3, 8\)"):
            op(jnp.ones((3, 8)), jnp.ones(shape), jnp.int32(3))


def test_a_map_without_its_bias_is_counted():
    with pytest.raises(ValueError, match="1 weights, 0 biases"):
        joined_matmul(jnp.ones((3, 8)), [jnp.ones((4, 8))], jnp.int32(3), [])
