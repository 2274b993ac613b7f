"""Dispatch: who runs, who may decline, what the environment forces."""

import subprocess
import sys

import jax.numpy as jnp
import pytest

from lora_jax.ops import dispatch


def declines():
    raise NotImplementedError("not these sizes")


def test_the_first_willing_kernel_runs():
    kernels = {"ffi": declines, "xla": lambda: "xla", "reference": lambda: "reference"}
    assert dispatch.call(kernels, None) == "xla"


def test_a_named_kernel_may_not_decline():
    kernels = {"ffi": declines, "reference": lambda: "reference"}
    with pytest.raises(NotImplementedError, match="not these sizes"):
        dispatch.call(kernels, "ffi")
    assert dispatch.call(kernels, "reference") == "reference"
    with pytest.raises(NotImplementedError, match=r"none of xla .* there are ffi, reference"):
        dispatch.call(kernels, "xla")


def test_the_environment_names_one_for_all(monkeypatch):
    monkeypatch.setenv(dispatch.ENV, "reference")
    assert dispatch.candidates() == ("reference",)
    assert dispatch.candidates("xla") == ("xla",)
    monkeypatch.setenv(dispatch.ENV, "fast")
    with pytest.raises(ValueError, match="'fast' is not one of cuda, pallas_gpu, pallas_tpu"):
        dispatch.candidates()


def test_cpu_kernels_are_not_tried_elsewhere(monkeypatch):
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "gpu")
    assert dispatch.candidates() == ("cuda", "pallas_gpu", "xla", "reference")
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: "tpu")
    assert dispatch.candidates() == ("pallas_tpu", "xla", "reference")


def test_a_backend_is_found_by_its_entry_point_and_imported_late(tmp_path, monkeypatch):
    info = tmp_path / "made_up-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[{dispatch.BACKENDS}]\nmade_up = made_up_backend:ops\n"
    )
    (tmp_path / "made_up_backend.py").write_text(
        "def ops():\n    return {'double': lambda x: 2 * x}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    double, other = dispatch.backend("made_up", "double"), dispatch.backend("made_up", "other")
    assert "made_up_backend" not in sys.modules
    assert double(3) == 6
    with pytest.raises(NotImplementedError, match="no backend 'made_up' with other"):
        other(3)


def test_a_backend_that_is_not_installed_declines_and_is_named_once(caplog):
    for op in ("lora_gemm", "merge"):
        with pytest.raises(NotImplementedError, match=f"no backend 'absent' with {op}"):
            dispatch.backend("absent", op)()
    (said,) = caplog.messages
    assert "No backend 'absent' is installed" in said


def test_dtypes_must_be_equal_and_known():
    x, half = jnp.zeros(2), jnp.zeros(2, jnp.float16)
    dispatch.check_dtypes("op", x=x, bias=None)
    with pytest.raises(ValueError, match="x float16"):
        dispatch.check_dtypes("op", x=half)
    with pytest.raises(ValueError, match="x float32, y float16"):
        dispatch.check_dtypes("op", x=x, y=half)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(dispatch.CACHE_ENV, str(tmp_path))
    assert dispatch.cache_folder() == tmp_path
    monkeypatch.delenv(dispatch.CACHE_ENV)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert dispatch.cache_folder() == tmp_path / "lora-jax"


def test_the_cpu_of_kernels_follows_the_environment(monkeypatch):
    monkeypatch.delenv(dispatch.MARCH_ENV, raising=False)
    assert dispatch.march() == "native"
    monkeypatch.setenv(dispatch.MARCH_ENV, "x86-64-v3")
    assert dispatch.march() == "x86-64-v3"
    monkeypatch.setenv(dispatch.MARCH_ENV, "native -fplugin=x.so")
    with pytest.raises(ValueError, match=r"LORA_JAX_MARCH=.* is not a name of g\+\+"):
        dispatch.march()


def test_pallas_kernels_are_imported_when_they_are_called():
    code = (
        "import sys, lora_jax.ops.lora_gemm, lora_jax.ops.grouped_matmul as g, jax.numpy as jnp\n"
        "loaded = lambda: [m for m in sys.modules if m.endswith('pallas_gpu')]\n"
        "assert not loaded(), loaded()\n"
        "x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16)\n"
        "try: g.grouped_matmul(x, w, jnp.array([4, 4]), implementation='pallas_gpu')\n"
        "except NotImplementedError as error: print(loaded(), error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert "grouped_matmul.pallas_gpu" in done.stdout
    assert "cannot run on cpu" in done.stdout
