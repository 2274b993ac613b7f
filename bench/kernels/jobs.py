"""Jobs that make the table's rows: programs compile side by side before any is timed.

Nothing else runs in this process while a program is timed: tracing would keep the host from
enqueueing. So a part traces all its programs first, and threads compile them meanwhile.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax


@dataclasses.dataclass(frozen=True)
class Job:
    """One row of the table; `programs` are those that `measure` waits for."""

    name: str
    programs: tuple[Future, ...]
    measure: Callable[[], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Machine:
    """State that all parts share: the machine's rates, and threads that compile."""

    bandwidth: float  # bytes per second of a large copy, read plus written
    dense: float  # FLOP/s of a large matmul of XLA's
    threads: ThreadPoolExecutor

    def compile(self, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Future:
        """Return the future of jit(function) for arguments of these shapes, traced at once.

        What tracing raises the future does: a point fails alone, when it is measured.
        """
        try:
            lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
        except Exception as error:
            failed = Future()
            failed.set_exception(error)
            return failed
        return self.threads.submit(lowered.compile)


class NamedPoint(Protocol):
    """One measurement of a part; its name is that of its row."""

    @property
    def name(self) -> str: ...


class Part(Protocol):
    """A module of the bench."""

    def points(self) -> tuple[NamedPoint, ...]:
        """Return everything it measures."""
        ...

    def jobs(self, points: list[Any], machine: Machine) -> list[Job]:
        """Return the jobs of some points, in their order, their programs being compiled."""
        ...
