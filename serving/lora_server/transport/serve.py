"""The server's loop: messages of any client, one by one, computed and answered."""

import collections
from collections.abc import Callable, Sequence

import numpy as np

from lora_jax.typing import Array
from serving.lora_server.transport.base import AbstractServer, Request

Compute = Callable[[Request], Sequence[Array | np.ndarray] | None]


def serve(
    server: AbstractServer, compute: Compute, *, depth: int = 2, idle_seconds: float = 0.1
) -> int:
    """Answer every message until the server is aborted; return how many were answered.

    `compute` returns the deltas of the request's site, or None to refuse; arrays that a device is
    still computing are welcome: up to `depth` requests of different clients are under way, one
    being received while another is computed and a third sent (InfiniLoRA, section 5.1). An error
    in `compute` ends the loop.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    under_way: collections.deque = collections.deque()
    answered = 0
    while not server.aborted() or under_way:
        room = len(under_way) < depth
        request = server.receive(0.0 if under_way else idle_seconds) if room else None
        if request is not None:
            under_way.append((request, compute(request)))
        elif under_way:
            answered += _answer(server, *under_way.popleft())
    return answered


def _answer(server: AbstractServer, request: Request, deltas) -> bool:
    if deltas is None:
        return server.refuse(request)
    return server.respond(request, [np.asarray(delta) for delta in deltas])
