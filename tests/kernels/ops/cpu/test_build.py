"""The C++ kernels: plain JAX where they cannot be built."""

import ctypes
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops import dispatch
from lora_jax.ops.cases import grouped_case, lora_case
from lora_jax.ops.cpu import build
from lora_jax.ops.grouped_matmul import grouped_matmul
from lora_jax.ops.lora_gemm import lora_gemm
from lora_jax.ops.reroute import row_map


def test_without_a_compiler_one_warning_is_logged(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build.native, "cpp_compilers", lambda: ())
    monkeypatch.setattr(build.dispatch, "cache_folder", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not build.available.__wrapped__()
    assert [r.message for r in caplog.records if "found; install one" in r.message]


def test_the_command_compiles_into_the_cache(monkeypatch, tmp_path):
    source = tmp_path / "sources" / "one.cc"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }')
    small = build.native.cpp_library("one", "test library", source.parent, ())
    monkeypatch.setattr(build, "library", lambda: small)
    monkeypatch.setattr(build.dispatch, "cache_folder", lambda: tmp_path / "cache")
    build.main()
    (made,) = (tmp_path / "cache").glob("*.so")
    build.main()  # once
    assert ctypes.CDLL(str(made)).one() == 1


def test_the_command_says_why_nothing_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(build.native, "cpp_compilers", lambda: ())
    monkeypatch.setattr(build.dispatch, "cache_folder", lambda: tmp_path)
    with pytest.raises(SystemExit, match=r"were not compiled: no C\+\+ compiler .*install one"):
        build.main()


def test_without_kernels_the_ops_run_as_plain_jax(monkeypatch):
    case = grouped_case(20, 3, 16, 24, bias=True)
    lora = lora_case(20, 16, 24)
    ids = jnp.array([[1, 0], [0, 1]], jnp.int32)

    def results():
        arrays = (case.x, case.w, case.group_sizes, case.bias)

        @jax.jit
        def run(arrays, adapters, ids):
            sorted_rows = row_map(ids, jnp.int32(2), 2)
            return grouped_matmul(*arrays), lora_gemm(*adapters, max_rank=64), sorted_rows.order

        return run(arrays, lora.arrays, ids)

    want = results()
    monkeypatch.setattr(build, "available", lambda: False)
    for got, expected in zip(results(), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-5)
    with pytest.raises(dispatch.Declined, match=f"{dispatch.NOT_BUILT}$"):
        build.require()
    with pytest.raises(NotImplementedError, match=dispatch.NOT_BUILT):
        grouped_matmul(case.x, case.w, case.group_sizes, implementation="ffi")


def test_a_call_refuses_buffers_of_another_type():
    build.require()
    call = jax.ffi.ffi_call("lora_jax_gemm_float32", [jax.ShapeDtypeStruct((4, 3), jnp.float32)])
    plain = {"facts": np.zeros(3, np.int64), "tables": np.zeros(16, np.float32)}
    x, w = jnp.ones((4, 2)), jnp.ones((1, 3, 2))
    sizes, bias = jnp.array([4], jnp.int32), jnp.zeros((0, 0))
    np.testing.assert_array_equal(call(x, sizes, w, bias, **plain)[0], jnp.full((4, 3), 2.0))
    for wrong_x, wrong_w in ((x.astype(jnp.bfloat16), w), (x, w.astype(jnp.bfloat16))):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"grouped_matmul: .* another type"):
            jax.block_until_ready(call(wrong_x, sizes, wrong_w, bias, **plain))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"weights are missing"):
        jax.block_until_ready(call(x, sizes, **plain))
