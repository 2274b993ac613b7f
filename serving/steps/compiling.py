"""Programs of steps are compiled several at a time, or read from files, the first one first."""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jax.stages import Lowered
from tqdm import tqdm

from serving.steps.kept_steps import KeptProgram

_COMPILING = 4  # programs at a time at most: each takes two cores, and memory


def compile_all(programs: Iterable[Lowered | KeptProgram], total: int, *, progress: bool) -> None:
    """Compile every program, several at a time: XLA works outside Python's lock."""
    bar = tqdm(total=total, desc="Compile", unit="program", disable=not progress)
    with bar, ThreadPoolExecutor(_workers()) as pool:
        jobs = []
        for lowered in programs:
            jobs.append(pool.submit(lowered.compile))
            jobs[-1].add_done_callback(lambda _: bar.update())
        for job in jobs:
            job.result()


def read_kept(programs: Sequence[KeptProgram], at_once: bool) -> None:
    """Read programs: the first, and others behind it, whose first calls wait for them.

    With `at_once` several at a time, and calls may begin with any of them.
    """
    if not at_once:
        programs[0].compile()
    pool = ThreadPoolExecutor(_workers() if at_once else 1, thread_name_prefix="programs")
    for program in programs if at_once else programs[1:]:
        pool.submit(program.compile)
    pool.shutdown(wait=False)


def _workers() -> int:
    return max(1, min(_COMPILING, (os.cpu_count() or 1) // 2))
