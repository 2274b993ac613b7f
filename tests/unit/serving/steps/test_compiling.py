"""Order in which programs are compiled or read."""

import gc
import os
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import pytest

from serving.steps import compiling
from serving.steps.compiling import compile_all, lowered, read_kept, runs_left, take_read
from serving.steps.kept_steps import KeptProgram
from serving.steps.model_runner import ModelRunner
from serving.steps.step_programs import Program as StepProgram


class Program(KeptProgram):
    """Notes its compiling; waits for `may` before."""

    is_done = False
    error = None

    def __init__(
        self,
        may: threading.Event | None = None,
        error: Exception | None = None,
        *,
        is_kept: bool = False,
    ):
        self.kept = is_kept
        self.done, self._may, self._error = threading.Event(), may, error

    @property
    def is_kept(self) -> bool:
        return self.kept

    def compile(self) -> None:
        if self._may is not None:
            assert self._may.wait(60)
        if self._error is not None:
            raise self._error
        self.done.set()


@pytest.mark.parametrize("answered", [2, 0], ids=["at once", "late"])
def test_a_program_that_waits_for_kernels_holds_up_no_trace(monkeypatch, answered):
    """Each program asks for a kernel; the first `answered` of them are there at once."""
    events, processes = [], SimpleNamespace(num_asked=0)

    class Traced:
        def __init__(self, number):
            events.append(f"trace {number}")
            processes.num_asked += 1
            self._number = number

        def lower(self):
            events.append(f"lower {self._number}")
            return self._number

    processes.has_answered = lambda count: count <= answered
    monkeypatch.setattr(compiling, "LoweringProcesses", lambda count: nullcontext(processes))
    monkeypatch.setattr(compiling, "lowered_in", nullcontext)
    assert list(lowered(map(Traced, range(3)))) == [0, 1, 2]
    traces, lowers = [[f"{what} {n}" for n in range(3)] for what in ("trace", "lower")]
    at_once = ["trace 0", "lower 0", "trace 1", "lower 1", "trace 2", "lower 2"]
    assert events == (at_once if answered else traces + lowers)


def test_kernels_of_a_gpu_s_programs_are_lowered_by_processes_where_cores_are(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert compiling._lowering() == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiling._lowering() == 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert compiling._lowering() == 0


@pytest.mark.parametrize(
    ("cores", "free", "workers"),
    [(1, 0, 1), (6, 99, 3), (32, None, 4), (32, 3, 5), (32, -1, 4), (32, 13, 8), (10, 13, 5)],
)
def test_more_programs_are_compiled_at_a_time_where_device_memory_is_free(
    monkeypatch, cores, free, workers
):
    """`free` is in GiB; a CPU says nothing of its memory."""
    stats = None if free is None else {"bytes_limit": 90 << 30, "bytes_in_use": (90 - free) << 30}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert compiling._workers() == workers


def test_no_garbage_is_collected_while_programs_are_traced():
    """A trace makes objects that stay: looking through all of them took a quarter of its time."""
    before, seen = gc.isenabled(), []

    def programs():
        for _ in range(2):
            seen.append(gc.isenabled())
            yield Program()

    compile_all(programs(), ["a", "b"])
    assert seen == [False, False]
    assert gc.isenabled() == before


def test_all_are_compiled_when_it_returns_and_errors_are_raised():
    programs = [Program() for _ in range(5)]
    compile_all(iter(programs), list("abcde"), progress=False)
    assert all(program.done.is_set() for program in programs)
    with pytest.raises(ValueError, match="no"):
        compile_all([Program(), Program(error=ValueError("no"))], ["a", "b"], progress=False)


def test_nothing_is_compiled_before_the_start_is_settled():
    kept, *others = Program(is_kept=True), Program(), Program()
    asked = []

    def settle():
        asked.append(kept.done.wait(60))
        raise ValueError("an adapter is wrong")

    with pytest.raises(ValueError, match="an adapter is wrong"):
        compile_all([kept, *others], list("abc"), progress=False, settle=settle)
    assert asked == [True]
    assert not any(other.done.is_set() for other in others)
    compile_all([kept], ["a"], progress=False, settle=settle)  # all are kept: it is not asked
    assert asked == [True]


def test_the_log_counts_programs_that_are_compiled_alone(caplog):
    caplog.set_level("INFO")
    with pytest.raises(ValueError, match="no"):
        compile_all([Program(), Program(error=ValueError("no"))], ["a", "b"], progress=True)
    assert caplog.messages == ["Compiling 2 programs, first a.", "Compiled 1 of 2 programs: a."]


def test_ctrl_c_waits_for_no_program(caplog, monkeypatch):
    """XLA cannot be stopped; the call must not wait for what it compiles."""
    monkeypatch.setattr(compiling, "_workers", lambda: 1)
    caplog.set_level("INFO")
    may = threading.Event()
    slow, never = Program(may), Program()

    def programs():
        yield slow
        yield never
        raise KeyboardInterrupt

    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_all(programs(), list("abc"), progress=True)
        assert time.monotonic() - begin < 30  # `slow` waits for 60 s
        assert not slow.done.is_set()
        assert caplog.messages == ["Compiling 3 programs, first a."]
    finally:
        may.set()
    while len(caplog.messages) < 2:  # the line of `slow` is no other test's
        time.sleep(0.01)


def test_the_first_is_read_and_the_others_behind_it(caplog):
    caplog.set_level("INFO")
    may = threading.Event()
    first, *others = (Program(wait, is_kept=True) for wait in (None, may, may))
    assert read_kept(iter([first, *others]), list("abc")) == ([first, *others], ())
    assert first.done.is_set()
    assert caplog.messages == ["Reading 3 kept programs, first a."]
    assert not any(other.done.is_set() for other in others)
    may.set()
    assert all(other.done.wait(60) for other in others)


def test_nothing_is_read_unless_all_are_kept():
    programs = [Program(is_kept=kept) for kept in (True, False, True, False)]
    taken = []
    kept, left = read_kept(((taken.append(p), p)[1] for p in programs), list("abcd"))
    assert (kept, taken) == ([], programs[:2])  # others are traced while the first are compiled
    assert list(left) == programs
    assert not programs[0].done.is_set()


def test_the_bar_names_what_is_lowered_and_compiled(capsys, monkeypatch):
    may = threading.Event()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def programs():
        yield Program(may)
        may.set()
        yield Program()

    compile_all(programs(), ["8 tokens", "32 tokens"], progress=True)
    said = capsys.readouterr().err
    assert "lowers 8 tokens" in said
    assert "lowers 32 tokens; compiles 8 tokens" in said


def test_a_log_file_gets_a_line_per_program_and_no_bar(capsys, caplog):
    caplog.set_level("INFO")
    names = ["8 tokens", "32 tokens"]
    compile_all([Program(), Program(is_kept=True)], names, progress=True)
    begun, *done = caplog.messages
    assert begun == "Compiling 2 programs, first 8 tokens."
    counts, programs = zip(*(text.split(" programs: ") for text in sorted(done)), strict=True)
    assert programs == ("8 tokens.", "32 tokens.")
    assert [count.split()[0] for count in counts] == ["Compiled", "Read"]
    assert sorted(count.partition(" ")[2] for count in counts) == ["1 of 2", "2 of 2"]
    compile_all([Program(), Program()], names, progress=False)
    assert len(caplog.messages) == 3
    assert "%" not in capsys.readouterr().err


def runner_with(cold):
    """A runner with these runs left, and the list of those that it has done."""
    runner, ran = ModelRunner.__new__(ModelRunner), []
    runner._cold = cold
    runner._inputs = SimpleNamespace(empty_table=lambda: "empty")
    runner._run = lambda table, program: ran.append((table, program))
    return runner, ran


def test_programs_that_were_read_run_on_nothing_while_there_is_no_work():
    """As a start that compiles them has each of them run once."""
    read, late = Program(), Program()
    read.is_done = True
    runner, ran = runner_with([(1, read), (2, late)])
    assert runner.run_cold()
    assert runner.run_cold()
    assert ran == [("empty", 1)]
    late.is_done = True
    assert not runner.run_cold()
    assert ran == [("empty", 1), ("empty", 2)]
    assert not runner.run_cold()


@pytest.mark.parametrize("num_runs", [1, 2])
def test_a_lazy_start_leaves_every_run_but_the_first_for_idle_times(num_runs):
    """On a GPU the second run of each program makes its CUDA graph: no caller waits for it."""
    programs = [StepProgram(bucket) for bucket in (8, 32, 64)]
    kept = [Program() for _ in programs]
    for one in kept:
        one.is_done = True
    runner, ran = runner_with(runs_left(programs, kept, num_runs))
    while runner.run_cold():
        pass
    done = [programs[0], *(program for _, program in ran)]
    assert done == programs * num_runs


def test_a_program_that_cannot_be_made_does_not_hold_up_those_behind_it(caplog):
    failed, read = Program(), Program()
    failed.is_done, failed.error, read.is_done = True, ValueError("no memory"), True
    cold = [(StepProgram(8), failed), (StepProgram(32), read)]
    assert take_read(cold) == StepProgram(32)
    assert cold == []
    assert "No program for 8 tokens lora: no memory" in caplog.text
    assert take_read(cold) is None


def test_no_semaphore_of_processes_is_made(monkeypatch):
    """The parent of an instance that is killed while it compiles would warn of it."""
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", None)
    monkeypatch.delattr("tqdm.std.TqdmDefaultWriteLock.mp_lock", raising=False)
    monkeypatch.delattr("tqdm.std.tqdm._lock", raising=False)
    program = Program()
    compile_all([program], ["one"], progress=True)
    assert program.done.is_set()
