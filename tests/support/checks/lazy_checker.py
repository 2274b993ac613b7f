"""Checks of annotated shapes and types, written when a function is first called.

beartype writes a checker for every function of a module when that is imported, which takes three
seconds of processor time for all of lora_jax. One process calls a part of them.
"""

import functools
from collections.abc import Callable

import beartype


def checked(function: Callable) -> Callable:
    """Return the function with its arguments and its result checked, for jaxtyping's hook."""
    if isinstance(function, type):
        return beartype.beartype(function)

    checker = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal checker
        if checker is None:
            checker = beartype.beartype(function)
        return checker(*args, **kwargs)

    return call
