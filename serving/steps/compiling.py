"""Programs of steps are compiled several at a time, or read from files, the first one first."""

import collections
import functools
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeGuard

import jax
from jax.stages import Compiled, Lowered, Traced
from tqdm import tqdm

from lora_jax.ops.lowered_once import lowered_in
from lora_jax.ops.lowering_processes import LoweringProcesses
from serving.runtime.garbage import no_collections
from serving.steps.kept_steps import KeptProgram
from serving.steps.step_programs import Program, names_of

logger = logging.getLogger(__name__)

_LOWERING = 8  # processes at most: a server has some 40 kernels, of seconds each
_CORES_TO_LOWER = 4  # on fewer, the imports of processes take what they save
_COMPILING = 4  # programs at a time at most: each takes up to two cores, and memory
_MORE = 4  # on a device with so much free memory for each of them, where XLA tries kernels
_MORE_BYTES = 2 << 30


class _Bar(tqdm):
    """A bar whose lock is of this process's threads.

    tqdm's own is also a semaphore of processes, which a process that is killed leaves behind: its
    parent would warn of it at its end.
    """


class _Progress:
    """Says which program is lowered, which ones are compiled, and which are done.

    On a terminal a bar does, elsewhere lines of the log; neither where it is not `shown`.
    """

    def __init__(self, names: SequenceOf[str], *, shown: bool):
        is_terminal = sys.stderr.isatty()
        self._names, self._has_lines = names, shown and not is_terminal
        self._at_work: dict[int, str] = {}
        self._numbers = itertools.count(1)
        _Bar.set_lock(threading.RLock())
        self._bar = _Bar(
            total=len(names), desc="Compile", unit="program", disable=not (shown and is_terminal)
        )

    def __enter__(self) -> "_Progress":
        if self._has_lines:
            logger.info("Compiling %d programs, first %s.", len(self._names), self._names[0])
        self.lowers(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def lowers(self, number: int) -> None:
        """Say that the program of this number, if there is one, is lowered now."""
        self._say([f"lowers {name}" for name in self._names[number : number + 1]])

    def compiles(self, number: int) -> None:
        """Have the program among those that are compiled, until it is done."""
        self._at_work[number] = self._names[number]

    def done(self, number: int, verb: str, job: Future) -> None:
        """Say that a program is compiled or read; a callback of its job."""
        name = self._at_work.pop(number)
        if job.cancelled() or job.exception() is not None:
            return
        if self._has_lines:
            number_done = next(self._numbers)
            logger.info("%s %d of %d programs: %s.", verb, number_done, len(self._names), name)
        self._bar.update()
        self._say([])

    def _say(self, parts: list[str]) -> None:
        at_work = list(self._at_work.values())  # other threads change it
        parts += [f"compiles {', '.join(at_work)}"] if at_work else []
        self._bar.set_postfix_str("; ".join(parts))


def compile_all(
    programs: Iterable[Lowered | KeptProgram],
    names: SequenceOf[str],
    *,
    progress: bool = False,
    settle: Callable[[], object] = lambda: None,
) -> list[Compiled]:
    """Compile every program, several at a time: XLA works outside Python's lock.

    `settle` returns before anything is compiled, which may take minutes, or raises what ends the
    start; programs that are kept are read without it.

    With `progress` a bar says by their names which program is lowered, and which ones are compiled;
    where stderr is no terminal, lines of the log say how many there are and name each that is done.
    """
    pool = ThreadPoolExecutor(_workers())
    is_interrupted = False
    with _Progress(names, shown=progress) as shown:
        try:
            return [job.result() for job in _submit(pool, programs, shown, settle)]
        except KeyboardInterrupt:  # XLA cannot be stopped: its programs take up to minutes
            is_interrupted = True
            raise
        finally:
            pool.shutdown(wait=not is_interrupted, cancel_futures=is_interrupted)


def _submit(
    pool: ThreadPoolExecutor,
    programs: Iterable[Lowered | KeptProgram],
    progress: _Progress,
    settle: Callable[[], object],
) -> list[Future]:
    """Return the jobs that compile or read the programs, which are lowered here one by one."""
    jobs: list[Future] = []
    with no_collections():
        for number, program in enumerate(programs):
            is_kept = _is_kept(program)
            progress.compiles(number)
            if not is_kept:
                settle()
            jobs.append(pool.submit(program.compile))
            verb = "Read" if is_kept else "Compiled"
            jobs[-1].add_done_callback(functools.partial(progress.done, number, verb))
            progress.lowers(number + 1)
    return jobs


def read_kept(
    programs: Iterable[Lowered | KeptProgram], names: SequenceOf[str]
) -> tuple[list[KeptProgram], Iterable[Lowered | KeptProgram]]:
    """Read programs if all of them are kept; return them and those that are left to compile.

    The first one is read, and the others behind it: their first calls wait for them. Else none are
    read here and all are left. The first that is not kept is the last that is lowered here.
    """
    kept: list[KeptProgram] = []
    rest = iter(programs)
    for program in rest:
        if not _is_kept(program):
            return [], itertools.chain(kept, [program], rest)
        kept.append(program)
    logger.info("Reading %d kept programs, first %s.", len(kept), names[0])
    kept[0].compile()
    pool = ThreadPoolExecutor(1, thread_name_prefix="programs")
    for program in kept[1:]:
        pool.submit(program.compile)
    pool.shutdown(wait=False)
    return kept, ()


def _is_kept(program: Lowered | KeptProgram) -> TypeGuard[KeptProgram]:
    return isinstance(program, KeptProgram) and program.is_kept


def runs_left(
    programs: SequenceOf[Program], kept: SequenceOf[KeptProgram], num_runs: int
) -> list[tuple[Program, KeptProgram]]:
    """Return what `take_read` takes, where each program is to run so often, and the first one has
    run once.

    A first call pays for a run that is left out: on a GPU the second one makes the CUDA graph.
    """
    return (list(zip(programs, kept, strict=False)) * num_runs)[1:]


def take_read(cold: list[tuple[Program, KeptProgram]]) -> Program | None:
    """Take the first of `runs_left` and return it if its program is there; drop what failed."""
    while cold and cold[0][1].is_done:
        program, kept = cold.pop(0)
        if kept.error is None:
            return program
        logger.error("No program for %s: %s", next(names_of([program], [])), kept.error)
    return None


def lowered(traced: Iterable[Traced | KeptProgram]) -> Iterator[Lowered | KeptProgram]:
    """Yield programs that are traced on demand, ready to compile, in their order.

    On a GPU processes lower their kernels side by side. While a program waits for its own, the next
    ones are traced, so that processes have their kernels in hand too.
    """
    programs, waiting = iter(traced), collections.deque()
    with LoweringProcesses(_lowering()) as processes:
        while True:
            with lowered_in(processes):
                program = next(programs, None)
            if program is None:
                break
            waiting.append((program, processes.num_asked))
            while waiting and processes.has_answered(waiting[0][1]):
                yield waiting.popleft()[0].lower()
        while waiting:
            yield waiting.popleft()[0].lower()


def _lowering() -> int:
    """Return how many processes lower kernels: none for a CPU, and on a host of few cores."""
    cores = len(os.sched_getaffinity(0))
    is_worth = jax.default_backend() == "gpu" and cores >= _CORES_TO_LOWER
    return min(_LOWERING, cores // 2) if is_worth else 0


def _workers() -> int:
    """Return how many programs are compiled at a time."""
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    most = _COMPILING + max(0, min(_MORE, free // _MORE_BYTES))
    return max(1, min(most, (os.cpu_count() or 1) // 2))
