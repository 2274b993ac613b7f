"""Calls on threads of their own, of which all succeed, or the others are ended. No jax."""

import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def all_or_none(calls: Sequence[Callable[[], Any]], end: Callable[[], None]) -> None:
    """Run the calls at once and return when all have; raise an error of theirs.

    After an error `end` must end what the other calls wait for; they are waited for.
    """
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            done, _ = concurrent.futures.wait(
                futures, return_when=concurrent.futures.FIRST_EXCEPTION
            )
        except BaseException:  # a signal: nobody waits any more
            end()
            raise
        errors = [error for future in done if (error := future.exception()) is not None]
        if errors:
            end()
    if errors:
        raise errors[0]
