"""Dispatch: which implementation runs, which may decline, what the environment forces."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

from lora_jax import ops
from lora_jax.ops import dispatch
from lora_jax.ops.choices import Choices
from lora_jax.ops.dispatch import ANY, GPU, Declined, Implementation, Op
from lora_jax.ops.lora_gemm import LORA_GEMM
from lora_jax.ops.merge import MERGE


def declines(*_):
    raise Declined("not these sizes")


def op_of(**kernels) -> Op:
    """Return an op whose implementations are tried everywhere, in this order."""
    return Op("made_up", tuple(Implementation(n, ANY, k) for n, k in kernels.items()))


@pytest.fixture(autouse=True)
def choices(monkeypatch):
    """A record of choices of this test alone."""
    monkeypatch.setattr(dispatch, "_CHOICES", Choices())


def declared_ops() -> dict[str, Op]:
    """Return the ops that the packages of lora_jax.ops declare, by name."""
    packages = [m.name for m in pkgutil.iter_modules(ops.__path__, "lora_jax.ops.") if m.ispkg]
    modules = map(importlib.import_module, packages)
    return {op.name: op for m in modules for op in vars(m).values() if isinstance(op, Op)}


def test_every_op_declares_its_implementations_once_and_one_for_every_platform():
    declared = declared_ops()
    assert {"lora_gemm", "grouped_matmul", "paged_attention", "reroute", "merge"} <= set(declared)
    for name, op in declared.items():
        names = [i.name for i in op.implementations]
        assert len(names) == len(set(names)), name
        known = (*dispatch.IMPLEMENTATIONS, dispatch.COMPOSED)
        assert set(names) <= set(known), name
        assert op.implementations[-1].platforms == ANY, name
        order = [known.index(n) for n in names]
        assert order == sorted(order), f"{name}: {names}"


def test_the_first_accepting_implementation_runs():
    op = op_of(ffi=declines, xla=lambda: "xla", reference=lambda: "reference")
    assert op.call(None) == "xla"
    assert dispatch.table() == {
        "made_up": [{"implementation": "xla", "declined": {"ffi": "not these sizes"}}]
    }


def test_a_named_implementation_may_not_decline():
    op = op_of(ffi=declines, reference=lambda: "reference")
    with pytest.raises(Declined, match="ffi: not these sizes"):
        op.call("ffi")
    assert op.call("reference") == "reference"
    with pytest.raises(Declined, match=r"no implementation 'xla'; .* declares ffi, reference"):
        op.call("xla")


def test_when_all_decline_every_reason_is_told():
    def too_wide():
        raise Declined("widths to 64, not 96")

    with pytest.raises(Declined, match=r"ffi: not these sizes; xla: widths to 64, not 96"):
        op_of(ffi=declines, xla=too_wide).call(None)


def test_an_error_of_jax_is_no_decline():
    def cannot_trace():
        raise NotImplementedError("no lowering for this primitive")

    with pytest.raises(NotImplementedError, match="no lowering") as raised:
        op_of(cuda=cannot_trace, xla=lambda: "xla").call(None)
    assert not isinstance(raised.value, Declined)
    assert dispatch.table() == {}


def test_a_declared_condition_declines_before_the_kernel_is_called():
    def no_kernel(x):
        raise AssertionError("called")

    def small(x):
        return None if x < 8 else f"takes numbers below 8, not {x}"

    kernels = (
        Implementation("cuda", ANY, no_kernel, accepts=(small,)),
        Implementation("xla", ANY, lambda x: x),
    )
    assert Op("made_up", kernels).call(None, 9) == 9
    (choice,) = dispatch.table()["made_up"]
    assert choice["declined"] == {"cuda": "takes numbers below 8, not 9"}


def test_only_the_hints_that_a_kernel_takes_reach_it():
    kernels = (Implementation("xla", ANY, lambda **hints: hints, hints=("rows",)),)
    assert Op("made_up", kernels).call(None, rows=3, groups=4) == {"rows": 3}


def test_what_stands_in_serves_names_that_are_not_declared():
    kernels = (
        Implementation("cuda", GPU, declines),
        Implementation("xla", ANY, lambda: "xla", stands_in=True),
    )
    op = Op("made_up", kernels)
    assert op.call("pallas_gpu") == "xla"
    with pytest.raises(Declined, match="not these sizes"):
        op.call("cuda")


def test_each_outcome_is_logged_once(caplog):
    op = op_of(ffi=declines, xla=lambda: "xla")
    with caplog.at_level("INFO"):
        for _ in range(3):
            op.call(None)
        op.call("xla")
    assert caplog.messages == [
        "Op made_up: xla (ffi declined: not these sizes).",
        "Op made_up: xla.",
    ]


def test_choices_of_a_kept_program_are_logged_as_if_traced_here(caplog):
    kept = {"made_up": [{"implementation": "xla", "declined": {"ffi": "not these sizes"}}]}
    with caplog.at_level("INFO"):
        dispatch.remember(kept)
        dispatch.remember(kept)
    assert dispatch.table() == kept
    assert caplog.messages == ["Op made_up: xla (ffi declined: not these sizes)."]


def test_the_environment_names_one_for_all(monkeypatch):
    op = op_of(ffi=declines, xla=lambda: "xla", reference=lambda: "reference")
    monkeypatch.setenv(dispatch.ENV, "reference")
    assert op.call(None) == "reference"
    assert op.call("xla") == "xla"
    monkeypatch.setenv(dispatch.ENV, "fast")
    with pytest.raises(ValueError, match="'fast' is not one of cuda, cudnn, pallas_gpu"):
        op.call(None)


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("cpu", ["ffi", "xla", "reference"]),
        ("gpu", ["cuda", "pallas_gpu", "xla", "reference"]),
        ("tpu", ["pallas_tpu", "xla", "reference"]),
        ("another", ["xla", "reference"]),
    ],
)
def test_kernels_of_other_platforms_are_not_tried(monkeypatch, platform, names):
    monkeypatch.setattr(dispatch.jax, "default_backend", lambda: platform)
    assert [i.name for i in LORA_GEMM.candidates()] == names


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
    double, other = (
        dispatch.backend_kernel("made_up", "double"),
        dispatch.backend_kernel("made_up", "other"),
    )
    assert "made_up_backend" not in sys.modules
    assert double(3) == 6
    with pytest.raises(NotImplementedError, match="no backend 'made_up' with other"):
        other(3)


def test_a_backend_of_another_package_is_used_where_it_is_named(tmp_path, monkeypatch):
    info = tmp_path / "own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{dispatch.BACKENDS}]\nown = own_backend:ops\n")
    code = "def ops():\n    return {'merge': lambda *args: 'own result'}\n"
    (tmp_path / "own_backend.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    dispatch.others.cache_clear()
    try:
        usual = [i.name for i in LORA_GEMM.candidates()]
        assert [i.name for i in MERGE.candidates()] == usual[1:]  # unasked it is not tried
        assert MERGE.call("own", "w") == "own result"
        assert [i.name for i in LORA_GEMM.candidates("own")] == usual  # which it lacks
        monkeypatch.setenv(dispatch.ENV, "own")
        assert [i.name for i in MERGE.candidates()] == ["own"]
        with pytest.raises(
            ValueError, match=r"'mine' is not one of cuda.*reference, own; a package"
        ):
            dispatch.requested("mine")
    finally:
        monkeypatch.undo()
        dispatch.others.cache_clear()
        dispatch._backend_ops.cache_clear()


def test_a_backend_that_is_not_installed_declines_and_is_named_once(caplog):
    for op in ("lora_gemm", "merge"):
        with pytest.raises(NotImplementedError, match=f"no backend 'absent' with {op}"):
            dispatch.backend_kernel("absent", op)()
    (said,) = caplog.messages
    assert "No backend 'absent' is installed" in said


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


@pytest.mark.long
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
