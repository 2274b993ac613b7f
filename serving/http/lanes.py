"""Threads for the work of one request that would hold up the event loop.

Short work and long work have threads of their own, so that short work never waits for long work.
The threads are few: work that runs in Python competes with the event loop for the interpreter.
"""

import asyncio
import enum
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Lane(enum.Enum):
    """Kind of a piece of work; the value is its name and its number of threads."""

    SHORT = "short", 2  # up to some 50 ms
    LONG = "long", 1
    IMAGES = "images", 2  # decoding
    FETCH = "fetch", 4  # waiting for other servers, some seconds each
    BODIES = "bodies", 1  # reading large ones, which keeps all other threads from running
    GRAMMAR = "grammar", 4  # waiting for the process that checks grammars


async def run_in[**P, T](
    lane: Lane, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Return what the function returns on one of the lane's threads."""
    work = functools.partial(function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(lane), work)


@functools.cache
def _threads(lane: Lane) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(lane.value[1], f"http-{lane.value[0]}")
