"""Build: once for a machine, whoever asks at the same time; plain JAX where it cannot be done."""

import concurrent.futures
import logging
import time

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.cases import grouped_case, lora_case
from lora_jax.ops.cpu import build
from lora_jax.ops.grouped_matmul import grouped_matmul
from lora_jax.ops.lora_gemm import lora_gemm
from lora_jax.ops.reroute import row_map


def test_concurrent_builds_compile_once(monkeypatch, tmp_path):
    compiled = []

    def slow_compile(compiler, library):
        compiled.append(library)
        time.sleep(0.2)
        library.write_bytes(b"library")

    monkeypatch.setattr(build, "_compile", slow_compile)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build.build, [tmp_path / "cache"] * 4))
    assert len(compiled) == 1
    assert paths == set(compiled)


def test_the_cache_key_follows_flags_cpu_and_sources(monkeypatch, tmp_path):
    compiler = build.find_compiler()
    assert compiler is not None
    keys = {build.cache_key(compiler)}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))
    keys.add(build.cache_key(compiler))
    monkeypatch.setattr(build, "cpu_name", lambda: "another cpu")
    keys.add(build.cache_key(compiler))
    other = tmp_path / "other.cc"
    other.write_text("int x;")
    monkeypatch.setattr(build, "sources", lambda: [other])
    keys.add(build.cache_key(compiler))
    assert len(keys) == 4
    assert build.cache_key(compiler) in keys


def test_a_compiler_error_is_told_and_leaves_no_file(monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.cc"
    wrong.write_text("this is not C++")
    monkeypatch.setattr(build, "sources", lambda: [wrong])
    with pytest.raises(build.BuildError, match=r"failed: .*wrong\.cc"):
        build.build(tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(build.BuildError, match="cannot write the kernel cache"):
        build.build(file / "cache")


def test_without_a_compiler_one_warning_is_logged(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr(build.dispatch, "cache_folder", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert not build.available.__wrapped__()
    assert [r.message for r in caplog.records if "no C++ compiler" in r.message]


def test_without_kernels_the_ops_run_as_plain_jax(monkeypatch):
    case = grouped_case(20, 3, 16, 24, bias=True)
    lora = lora_case(20, 16, 24)
    ids = jnp.array([[1, 0], [0, 1]], jnp.int32)

    def results():
        arrays = (case.x, case.w, case.group_sizes, case.bias)
        sorted_rows = row_map(ids, jnp.int32(2), 2)
        return grouped_matmul(*arrays), lora_gemm(*lora.arrays, max_rank=64), sorted_rows.order

    want = results()
    monkeypatch.setattr(build, "available", lambda: False)
    for got, expected in zip(results(), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match="could not be built"):
        grouped_matmul(case.x, case.w, case.group_sizes, implementation="ffi")
