"""Server base of all transports: seats of clients, and their closing."""

import abc
import threading
from collections.abc import Callable, Sequence

import numpy as np

from serving.lora_server.transport.base import AbstractServer, Request
from serving.lora_server.transport.shapes import Shapes


class AbstractServerBase[Seat](AbstractServer):
    """A server that keeps a `Seat` for each client, by the client's number.

    `_lock` is held for whatever looks at seats, epochs or whether the server is closed: clients
    come and go on other threads.
    """

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        self._lock = threading.Lock()
        self._seats: dict[int, Seat] = {}
        self._epoch = 0
        self._aborted = self._closed = False
        self._at_close: list[Callable[[], None]] = []

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have something closed with the server, before its slots."""
        self._at_close.append(callback)

    def respond(self, request: Request, deltas: Sequence[np.ndarray]) -> bool:
        site, kept = self.shapes.sites[request.site], []
        if len(deltas) != len(site.d_outs):
            raise ValueError(f"{site.name} has {len(site.d_outs)} outputs, got {len(deltas)}.")
        for index, (delta, width) in enumerate(zip(deltas, site.d_outs, strict=True)):
            rows_fit = delta.ndim == 2 and delta.shape[0] >= request.rows
            if delta.dtype != self.shapes.result_dtype or not rows_fit or delta.shape[1] != width:
                raise ValueError(
                    f"output {index} of {site.name} must be {self.shapes.delta_dtype} "
                    f"[{request.rows} or more, {width}], got {delta.dtype} {delta.shape}."
                )
            kept.append(np.ascontiguousarray(delta[: request.rows]))
        return self._answer(request, kept)

    def refuse(self, request: Request) -> bool:
        return self._answer(request, None)

    def aborted(self) -> bool:
        return self._aborted

    def clients(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._seats)

    def close(self) -> None:
        self.abort()
        while self._at_close:
            self._at_close.pop()()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._seats.clear()
            self._free()

    def _next_epoch(self, last_epoch: int) -> int:
        """Return the epoch of a new seat, above the last one that its client has seen; locked.

        The server's own count goes on by one: what one client says moves no other client's epoch.
        """
        self._epoch += 1
        return max(self._epoch, last_epoch + 1)

    @abc.abstractmethod
    def _answer(self, request: Request, deltas: Sequence[np.ndarray] | None) -> bool:
        """Push C-contiguous [rows, d_out] of each output, or refuse; False if nobody is there."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Give the slots back; called once, under the lock."""
