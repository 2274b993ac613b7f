"""Steps in files: the same results without tracing, and compiled again where a file is no good."""

import functools
import os
from concurrent.futures import CancelledError
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as jax_cache
from support.processes.server_process import ROOT

from lora_jax.ops import dispatch
from lora_jax.ops.choices import Choices
from lora_jax.ops.dispatch import ANY, Declined, Implementation, Op
from serving.runtime.program_files import ProgramFiles
from serving.steps import kept_steps
from serving.steps.kept_steps import KeptSteps, NotKept, identity

MODEL = ROOT / "assets" / "stories260k"


def jitted(traced: list):
    """Return a step of the form of ours that notes when it is traced."""

    @functools.partial(jax.jit, static_argnames=("trees", "bucket"), donate_argnums=0)
    def step(donated, rest, trees, *, bucket):
        traced.append(bucket)
        return [x + bucket for x in donated], rest[0] @ rest[1]

    return step


LEAST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def kept(tmp_path):
    (tmp_path / "programs").mkdir()
    programs = ProgramFiles(tmp_path / "programs", 1 << 20)
    before = getattr(jax.config, LEAST)
    jax.config.update(LEAST, 1e9)  # on a busy machine the tests' own cache would take the programs
    yield KeptSteps(ProgramFiles(tmp_path, 1 << 20), programs, "code")
    jax.config.update(LEAST, before)


def arguments():
    rest = [jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2))]
    trees = jax.tree.structure([1]), jax.tree.structure(rest)
    return [jnp.arange(4)], rest, trees


def run(kept: KeptSteps, *facts, traced: list):
    """Return the results of a new process' first step, and whether it was kept."""
    step = kept.keep("step", jitted(traced), *facts)
    program = step.lower(*arguments(), bucket=8)
    was_kept = program.is_kept
    program.compile()
    return jax.tree.map(np.asarray, step(*arguments(), bucket=8)), was_kept


def test_a_second_process_runs_the_same_step_without_tracing_it(kept):
    traced = []
    first, was_kept = run(kept, traced=traced)
    assert (was_kept, traced) == (False, [8])
    second, was_kept = run(kept, traced=traced)
    assert (was_kept, traced) == (True, [8])
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert not run(kept, "other sizes", traced=traced)[1]


def test_a_step_is_read_before_it_is_asked_for_and_one_that_is_not_there_is_made(kept, monkeypatch):
    first, _ = run(kept, traced=[])
    nowhere, hostile = "0" * 64, "../budgets/planted"
    kept_steps.read_ahead(kept.files, [key := kept_steps.used[-1], nowhere, hostile])
    assert hostile not in kept_steps._AHEAD
    assert kept_steps._AHEAD[key].found.result(60)
    assert kept_steps._AHEAD.pop(nowhere).loaded.result(60) is None
    with monkeypatch.context() as patched:
        patched.setattr(ProgramFiles, "get", None)  # nobody reads the file once more
        second, was_kept = run(kept, traced=(traced := []))
    assert (was_kept, traced) == (True, [])
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_programs_that_differ_in_shapes_alone_are_told_apart(kept):
    donated, rest, trees = arguments()
    longer = [jnp.arange(12.0).reshape(4, 3), rest[1]]
    for was_kept in (False, True):
        step = kept.keep("step", jitted(traced := []))
        for given in (rest, longer):
            program = step.lower(donated, given, trees, bucket=8)
            assert program.is_kept is was_kept
            program.compile()
        shapes = [step(*arguments()[:1], g, trees, bucket=8)[1].shape for g in (longer, rest)]
        assert (shapes, len(traced)) == ([(4, 2), (2, 2)], 0 if was_kept else 2)


def test_a_step_of_other_arguments_is_traced(kept):
    step = kept.keep("step", jitted(traced := []))
    step.lower(*arguments(), bucket=8).compile()
    donated, rest, trees = arguments()
    step([donated[0].astype(jnp.float32)], rest, trees, bucket=16)
    assert traced == [8, 16]


@pytest.mark.parametrize("damage", [b"", b"no pickle"])
def test_a_damaged_file_is_compiled_again(kept, tmp_path, damage):
    first, _ = run(kept, traced=[])
    (file,) = tmp_path.glob("*.compiled")
    file.write_bytes(damage)
    again, was_kept = run(kept, traced=(traced := []))
    assert (was_kept, traced) == (False, [8])
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_a_program_that_cannot_be_loaded_is_compiled_again(kept, caplog):
    first, _ = run(kept, traced=[])
    step = kept.keep("step", jitted(traced := []))
    program = step.lower(*arguments(), bucket=8)
    program._kept = b"of another XLA", *program._kept[1:]
    program.compile()
    assert "cannot be loaded" in caplog.text
    again = jax.tree.map(np.asarray, step(*arguments(), bucket=8))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert traced == [8]


class Kernel(list):
    """In place of the list of what is traced: tracing chooses this implementation of an op."""

    def __init__(self, name: str, unbuilt: str = ""):
        """`unbuilt` names one that is tried before and cannot be built."""
        super().__init__()
        first = [Implementation(unbuilt, ANY, self._decline)] if unbuilt else []
        self.op = Op("made_up", (*first, Implementation(name, ANY, lambda: None)))

    def _decline(self):
        raise Declined(f"the CPU {dispatch.NOT_BUILT}")

    def append(self, bucket: int) -> None:
        super().append(bucket)
        self.op.call(None)


def test_a_step_whose_kernels_are_not_there_is_traced(kept, monkeypatch):
    monkeypatch.setattr(dispatch, "_CHOICES", Choices())
    run(kept, traced=Kernel("cuda"))
    for there in (True, False):
        monkeypatch.setitem(kept_steps._READY, "cuda", lambda there=there: there)
        assert run(kept, traced=(traced := []))[1] is there
        assert traced == ([] if there else [8])


def test_a_step_with_kernels_of_another_package_is_traced_at_each_start(kept, monkeypatch):
    monkeypatch.setattr(dispatch, "_CHOICES", Choices())
    for _ in range(2):
        assert not run(kept, traced=(traced := Kernel("own")))[1]
        assert traced == [8]


def test_a_step_is_traced_again_where_kernels_have_been_built_since(kept, monkeypatch):
    """Whoever installs the compiler that the log asked for gets what it makes."""
    monkeypatch.setattr(dispatch, "_CHOICES", Choices())
    monkeypatch.setitem(kept_steps._READY, "ffi", lambda: False)
    run(kept, traced=Kernel("xla", unbuilt="ffi"))
    assert run(kept, traced=(traced := []))[1]
    assert traced == []
    monkeypatch.setitem(kept_steps._READY, "ffi", lambda: True)
    assert not run(kept, traced=(traced := Kernel("ffi")))[1]
    assert traced == [8]
    assert run(kept, traced=[])[1]


def test_a_step_asks_for_the_kernels_of_its_own_trace(kept, monkeypatch):
    monkeypatch.setattr(dispatch, "_CHOICES", Choices())
    monkeypatch.setitem(kept_steps._READY, "cuda", lambda: False)
    Kernel("cuda").append(0)  # another engine of this process
    run(kept, traced=Kernel("xla"))
    assert run(kept, traced=(traced := []))[1]
    assert traced == []


def test_a_step_that_is_lowered_twice_keeps_the_kernels_of_its_trace(kept, monkeypatch):
    monkeypatch.setattr(dispatch, "_CHOICES", Choices())
    step = kept.keep("step", jitted(traced := Kernel("cuda")))
    for _ in range(2):  # jax does not trace it again
        program = step.lower(*arguments(), bucket=8)
    program.compile()
    assert list(traced) == [8]
    monkeypatch.setitem(kept_steps._READY, "cuda", lambda: False)
    assert not run(kept, traced=[])[1]


def test_a_step_that_cannot_be_written_runs_and_the_log_says_so(kept, monkeypatch, caplog):
    monkeypatch.setattr(ProgramFiles, "put", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    first, _ = run(kept, traced=[])
    np.testing.assert_array_equal(first[0][0], np.arange(4) + 8)
    folder = kept.files.folder
    said = f"A step is not kept in {folder}, and the next start compiles it again: disk full"
    assert said in caplog.text


def test_a_closed_step_gives_up_what_nobody_waits_for(kept):
    step = kept.keep("step", jitted([]))
    left, done = (step.lower(*arguments(), bucket=bucket) for bucket in (8, 16))
    done.compile()
    step.close()
    assert (left.is_given_up, done.is_given_up) == (True, False)
    with pytest.raises(CancelledError):
        left.compile()


@pytest.fixture
def kept_by_jax(kept, monkeypatch):
    """As `kept`, and jax reads and writes `programs`."""
    monkeypatch.setattr(jax_cache, "get_file_cache", lambda path: (kept.programs, path))
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(kept.programs.folder))
    jax.config.update(LEAST, 0.0)
    jax_cache.reset_cache()
    yield kept
    jax.config.update("jax_compilation_cache_dir", folder)
    jax_cache.reset_cache()


def test_what_jax_had_is_kept_from_its_file(kept_by_jax):
    """As after a change of code that leaves a program as it was: XLA cannot write it again."""
    files = kept_by_jax.files.folder
    first, _ = run(kept_by_jax, traced=[])
    for file in files.glob("*.compiled"):
        file.unlink()
    assert not run(kept_by_jax, traced=[])[1]
    for file in kept_by_jax.programs.folder.iterdir():
        file.unlink()
    again, was_kept = run(kept_by_jax, traced=(traced := []))
    assert (was_kept, traced) == (True, [])
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_what_jax_had_is_kept_once_when_it_is_lowered_again(kept_by_jax):
    """Then jax looks into no file: it has the program that it read before."""
    run(kept_by_jax, traced=[])
    (file,) = kept_by_jax.files.folder.glob("*.compiled")
    file.unlink()
    step = kept_by_jax.keep("step", jitted([]))
    programs = [step.lower(*arguments(), bucket=8) for _ in range(2)]
    for program in programs:
        program.compile()
    assert run(kept_by_jax, traced=(traced := []))[1]
    assert traced == []


def test_an_identity_names_all_that_programs_are_made_from(monkeypatch):
    before = identity({"max_num_seqs": 2}, MODEL)
    assert before == identity({"max_num_seqs": 2}, MODEL)
    assert before != identity({"max_num_seqs": 3}, MODEL)
    assert before != identity({"max_num_seqs": 2}, ROOT / "assets" / "tiny-moe")
    monkeypatch.setitem(os.environ, "LORA_JAX_OPS", "reference")
    assert before != identity({"max_num_seqs": 2}, MODEL)


@pytest.mark.parametrize("variable", ["LORA_JAX_CACHE", "JAX_COMPILATION_CACHE_DIR"])
def test_steps_of_a_folder_that_was_moved_are_found(variable, monkeypatch, tmp_path):
    before = identity({}, MODEL)
    monkeypatch.setitem(os.environ, variable, str(tmp_path))
    values = jax.config.values | {"jax_compilation_cache_dir": str(tmp_path)}
    monkeypatch.setattr(kept_steps.jax, "config", SimpleNamespace(values=values))
    assert identity({}, MODEL) == before


def test_an_identity_names_what_xla_runs_with_on_an_accelerator(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kept_steps.jax, "default_backend", lambda: "gpu")
    (wheel := tmp_path / "nvidia_cudnn_cu13-9.1.0.dist-info").mkdir()
    assert wheel.name in kept_steps._wheels()
    before = identity({}, MODEL)
    wheel = wheel.rename(tmp_path / "nvidia_cudnn_cu13-9.2.0.dist-info")
    assert (newer := identity({}, MODEL)) != before
    topology = SimpleNamespace(fingerprint=lambda: 7)
    monkeypatch.setattr(kept_steps.xla_client, "get_topology_for_devices", lambda devices: topology)
    assert identity({}, MODEL) != newer


def test_a_backend_without_a_topology_has_an_identity(monkeypatch):
    def unknown(devices):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr(kept_steps.xla_client, "get_topology_for_devices", unknown)
    assert len(identity({}, MODEL)) == 64


def test_a_step_that_is_demanded_is_not_made(kept, tmp_path):
    run(kept, traced=[])
    demanding = ProgramFiles(tmp_path, 1 << 20, writes=False, demands=True)
    reading = KeptSteps(demanding, kept.programs, "code")
    traced = []
    assert run(reading, traced=traced)[1]
    with pytest.raises(NotKept, match=f"not kept in {tmp_path}"):
        run(reading, "other sizes", traced=traced)
    assert traced == []
