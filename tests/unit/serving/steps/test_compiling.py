"""Order in which programs are compiled or read."""

import threading

import pytest

from serving.steps.compiling import compile_all, read_kept


class Program:
    """Notes its compiling; waits for `may` before."""

    def __init__(self, may: threading.Event | None = None, error: Exception | None = None):
        self.done, self._may, self._error = threading.Event(), may, error

    def compile(self) -> None:
        if self._may is not None:
            assert self._may.wait(60)
        if self._error is not None:
            raise self._error
        self.done.set()


def test_all_are_compiled_when_it_returns_and_errors_are_raised():
    programs = [Program() for _ in range(5)]
    compile_all(iter(programs), 5, progress=False)
    assert all(program.done.is_set() for program in programs)
    with pytest.raises(ValueError, match="no"):
        compile_all([Program(), Program(error=ValueError("no"))], 2, progress=False)


def test_the_first_is_read_and_the_others_behind_it():
    may = threading.Event()
    first, *others = Program(), Program(may), Program(may)
    read_kept([first, *others])
    assert first.done.is_set()
    assert not any(other.done.is_set() for other in others)
    may.set()
    assert all(other.done.wait(60) for other in others)
