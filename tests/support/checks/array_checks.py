"""Checks of annotated arrays: every call in a test checks those that it takes and gives.

jaxtyping's import hook decorates every function with `jaxtyping.jaxtyped`, which checks arguments
twice, and those of functions without arrays too. That took over a quarter of the time in which an
engine of tests starts. The decorator here checks functions and dataclasses whose annotations name
arrays, once a call. beartype writes a checker in about a millisecond: it does so at a function's
first call.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import beartype
import jax
import jaxtyping
from beartype.roar import BeartypeCallHintViolation

_jaxtyped = jaxtyping.jaxtyped


def install(modules: Sequence[str]) -> None:
    """Check what modules of these names and below them annotate, when they are imported."""
    jaxtyping.jaxtyped = lambda typechecker: checked  # the hook's code calls it so
    jaxtyping.install_import_hook(modules, "support.checks.array_checks.checked")


def checked[T: Callable](made: T) -> T:
    """Return a function or class whose annotated arrays are checked; others as they are."""
    if not isinstance(made, type):
        return _checked(made) if _has_arrays(made) else made
    own = vars(made).get("__init__")
    if dataclasses.is_dataclass(made) and own is not None and not hasattr(own, "__wrapped__"):
        made.__init__ = checked(own)
    return made


def _checked(function: Callable) -> Any:
    checker = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal checker
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if checker is None:
            checker = beartype.beartype(function)
        with _jaxtyped("context"):  # an axis name means one size in all of a call
            try:
                return checker(*args, **kwargs)
            except BeartypeCallHintViolation as error:
                raise jaxtyping.TypeCheckError(str(error)) from error

    return call


def _has_arrays(function: Callable) -> bool:
    annotations = getattr(function, "__annotations__", {})
    return any(map(_names_arrays, annotations.values()))


def _names_arrays(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "Array" in annotation
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return annotation.__module__ == "jaxtyping" or issubclass(annotation, jax.Array)
    return any(map(_names_arrays, typing.get_args(annotation)))
