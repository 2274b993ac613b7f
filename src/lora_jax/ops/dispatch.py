"""Chooses the implementation of an op while a program is traced, and keeps the reasons.

An op declares its implementations in order of preference (`Op`, `Implementation`): on which
platforms each is tried, what it accepts, and where its code is, which is imported when it is first
called. An implementation declines by raising `Declined`; the next one is tried. `table()` tells
which implementation serves each op and why those before it declined.

"cuda" is the backend of that name, found by its entry point, and a backend of another package has
a name of its own and is used where it is asked for; "cudnn" is NVIDIA's library;
"pallas_gpu" (Mosaic) and "pallas_tpu" are kernels written in JAX; "ffi" is C++ on a CPU, built at
first use; "xla" is portable JAX whose cost follows the rows; "reference" states the meaning;
"composed" is made of another op, whose own entries in the table tell what computes.
`LORA_JAX_OPS` names one of them for the whole process; `LORA_JAX_CACHE` is the folder of compiled
kernels; `LORA_JAX_MARCH` is the CPU that C++ kernels are compiled for, as `g++ -march` takes it. No
other module of ops reads the environment.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax

from lora_jax.ops.choices import Choice, Choices

log = logging.getLogger(__name__)

ENV = "LORA_JAX_OPS"
CACHE_ENV = "LORA_JAX_CACHE"
MARCH_ENV = "LORA_JAX_MARCH"
BACKENDS = "lora_jax.backends"  # entry points: a function that returns {op: kernel}
IMPLEMENTATIONS = ("cuda", "cudnn", "pallas_gpu", "pallas_tpu", "ffi", "xla", "reference")
COMPOSED = "composed"  # not to be named by a caller: the other op knows no such name
NOT_BUILT = "kernels could not be built"  # ends the reason of those that a later start may have
# Platforms of jax on which an implementation is tried unasked.
GPU, TPU, CPU, ANY = ("gpu",), ("tpu",), ("cpu",), ("any",)


class Declined(NotImplementedError):
    """An implementation refuses these arguments or this machine; the text is the reason.

    A NotImplementedError of any other class is an error of the kernel or of jax, and is raised.
    """


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    `accepts` are conditions that need no kernel code: each gets the op's arguments and returns the
    reason to decline, or None. `hints` are the optional keyword arguments that the kernel takes.
    """

    name: str
    platforms: tuple[str, ...]
    kernel: Callable
    accepts: tuple[Callable[..., str | None], ...] = ()
    hints: tuple[str, ...] = ()
    # Serves also where a name is asked for that the op does not declare.
    stands_in: bool = False
    # Gives float32 results of bfloat16 arguments at no cost.
    wide_sums: bool = False

    def is_tried_on(self, platform: str) -> bool:
        """Return whether this implementation is tried unasked on a platform of jax."""
        return self.platforms == ANY or platform in self.platforms

    def __call__(self, *args, **hints):
        """Return the op's result, or raise Declined."""
        for condition in self.accepts:
            if (reason := condition(*args)) is not None:
                raise Declined(reason)
        return self.kernel(*args, **{k: v for k, v in hints.items() if k in self.hints})


@dataclasses.dataclass(frozen=True)
class Op:
    """An op by its name, with its implementations in the order in which they are tried."""

    name: str
    implementations: tuple[Implementation, ...]

    def candidates(self, implementation: str | None = None) -> tuple[Implementation, ...]:
        """Return what is tried: the named one, else those of the platform.

        The name comes from the caller or from the environment. An op that a backend of another
        package lacks is computed as without it.

        Raises:
            ValueError: the name is not an implementation.
        """
        name = requested(implementation)
        if name in others() and self.name in _backend_ops(name):
            return (Implementation(name, ANY, backend_kernel(name, self.name)),)
        if name is None or name in others():
            platform = jax.default_backend()
            return tuple(i for i in self.implementations if i.is_tried_on(platform))
        named = tuple(i for i in self.implementations if i.name == name)
        return named or tuple(i for i in self.implementations if i.stands_in)

    def call(self, implementation: str | None, *args, **hints) -> Any:
        """Return what the first accepting implementation gives.

        Raises:
            Declined: every candidate declines; the text has the reason of each.
        """
        declined: dict[str, str] = {}
        for candidate in self.candidates(implementation):
            try:
                result = candidate(*args, **hints)
            except Declined as reason:
                declined[candidate.name] = str(reason)
                continue
            _record(self.name, Choice(candidate.name, declined))
            return result
        raise Declined(self._all_declined(implementation, declined))

    def _all_declined(self, implementation: str | None, declined: Mapping[str, str]) -> str:
        declares = f"{self.name} declares {', '.join(i.name for i in self.implementations)}"
        if not declined:
            return f"{self.name}: no implementation {requested(implementation)!r}; {declares}"
        reasons = "; ".join(f"{name}: {reason}" for name, reason in declined.items())
        return f"{self.name}: no implementation accepts these arguments: {reasons} ({declares})"


def requested(implementation: str | None = None) -> str | None:
    """Return the implementation that the caller or else the environment names, or None.

    Raises:
        ValueError: there is none of that name.
    """
    name = implementation or os.environ.get(ENV)
    if name and name not in (known := (*IMPLEMENTATIONS, *others())):
        raise ValueError(
            f"implementation {name!r} is not one of {', '.join(known)}; a package adds one by an "
            f"entry point of {BACKENDS}"
        )
    return name or None


@functools.cache
def others() -> tuple[str, ...]:
    """Return the names of backends that other packages offer by entry points."""
    names = {entry.name for entry in importlib.metadata.entry_points(group=BACKENDS)}
    return tuple(sorted(names.difference(IMPLEMENTATIONS)))


# Which implementation serves an op is a fact of the process, as its devices are.
_CHOICES = Choices()
_NOTED: ContextVar[Choices | None] = ContextVar("noted", default=None)  # see noted


def table() -> dict[str, list[dict[str, Any]]]:
    """Return for each op that was traced its choices: {implementation, declined: {name: reason}}.

    An op has several where dtypes or shapes decide: float32 by one kernel, bfloat16 by another.
    """
    return _CHOICES.table()


def remember(choices: Mapping[str, list[dict[str, Any]]]) -> None:
    """Record and log the `table` of programs that another process traced and this one runs."""
    for op, outcomes in choices.items():
        for outcome in outcomes:
            _record(op, Choice(**outcome))


@contextlib.contextmanager
def noted() -> Iterator[Choices]:
    """Note the outcomes of what this thread traces meanwhile: those of one program.

    What jax has traced before, it does not trace again, and nothing is noted.
    """
    token = _NOTED.set(choices := Choices())
    try:
        yield choices
    finally:
        _NOTED.reset(token)


def _record(op: str, choice: Choice) -> None:
    """Record an outcome; log a new one: which implementation serves, and why others declined."""
    if (program := _NOTED.get()) is not None:
        program.add(op, choice)
    if not _CHOICES.add(op, choice):
        return
    if not choice.declined:
        log.info("Op %s: %s.", op, choice.implementation)
        return
    reasons = "; ".join(f"{name} declined: {reason}" for name, reason in choice.declined.items())
    log.info("Op %s: %s (%s).", op, choice.implementation, reasons)


def backend_kernel(name: str, op: str) -> Callable:
    """Return a kernel that is looked up in a backend when it is first called.

    It declines where the backend is not installed or lacks the op. So a backend's code is imported
    only on machines that ask for it.
    """

    def kernel(*args, **kwargs):
        ops = _backend_ops(name)
        if op not in ops:
            raise Declined(f"no backend {name!r} with {op} is installed")
        return ops[op](*args, **kwargs)

    return kernel


def lazy_kernel(module: str, name: str) -> Callable:
    """Return a kernel whose module is imported when it is first called.

    The Pallas kernels bring compilers with them that most processes never need.
    """

    def kernel(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return kernel


@functools.cache
def _backend_ops(name: str) -> Mapping[str, Callable]:
    entries = importlib.metadata.entry_points(group=BACKENDS, name=name)
    if not entries:
        log.warning(
            "No backend %r is installed (entry points of %s): other kernels stand in. "
            "A checkout has them once it is installed: pip install --editable .",
            name,
            BACKENDS,
        )
    return {op: kernel for entry in entries for op, kernel in entry.load()().items()}


def cache_folder() -> Path:
    """Return the folder for compiled kernels: `LORA_JAX_CACHE`, or lora-jax in the user's cache."""
    if named := os.environ.get(CACHE_ENV):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lora-jax"


def march() -> str:
    """Return the CPU that C++ kernels are compiled for: `LORA_JAX_MARCH`, or this one.

    Raises:
        ValueError: the variable is not the name of a CPU.
    """
    name = os.environ.get(MARCH_ENV) or "native"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise ValueError(
            f"{MARCH_ENV}={name!r} is not a name of g++ -march: native, x86-64-v3, armv8.2-a, ..."
        )
    return name
