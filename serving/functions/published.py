"""A backbone's pages as their agent has them: manifest and descriptors, no mapping. No jax.

The process that loads them ends when it has handed them over. One that ends before is replaced by a
backup, once. The memory stays as long as the descriptors are open here.
"""

import logging
import math
import socket
import threading
import weakref
from typing import Any

from lora_jax.memory.wire import close_all, receive_fds, send_fds, send_header
from serving.functions.processes import end_process, expect, spawn

logger = logging.getLogger(__name__)

_LOADS = 2
_RENEW_S = 600.0  # that a start waits for pages that are being loaded anew


class _Pages:
    """Manifest and descriptors of one load; used under the lock of who has them."""

    def __init__(self, manifest: dict[str, Any], fds: list[int]):
        self.manifest, self.fds = manifest, fds
        self.senders, self.is_old = 0, False

    def unused(self) -> list[int]:
        """Return the descriptors to close: all, once the pages are old and nobody sends them."""
        if self.senders or not self.is_old:
            return []
        fds, self.fds = self.fds, []
        return fds

    def retire(self) -> list[int]:
        """Send these to nobody else; return the descriptors to close now."""
        self.is_old = True
        return self.unused()


class Published:
    """One backbone; any thread may call."""

    def __init__(self, model: str, dtype: str | None):
        """Load the model in a process. Raises ValueError for one that cannot be shared,
        ConnectionError where the backup's process ends too.
        """
        self._model, self._dtype = model, dtype
        self._lock = threading.Condition()  # the pages, which are sent without it
        self._unfit = self._failed = ""  # why these pages are sent to nobody; and will not be
        self._closed = False
        self._sent: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # to whom, of these pages
        manifest, fds, self.device = self._load()
        self._pages = _Pages(manifest, fds)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages, counted once for all processes that map them."""
        return sum(self._pages.manifest["blocks"])

    @property
    def leaves(self) -> dict[str, Any]:
        """Name, shape, dtype, place and SHA-256 of every array."""
        return self._pages.manifest["leaves"]

    def send(self, connection: socket.socket, order: dict[str, Any]) -> None:
        """Send an order with the manifest in it, and the descriptors behind it.

        Waits while the pages are loaded anew. Raises ConnectionError where that has failed, and
        after `close`. A process that does not read holds up no other send.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._unfit or self._failed or self._closed, _RENEW_S)
            if self._closed:
                raise ConnectionError("The backbone is closed.")
            if self._unfit:
                raise ConnectionError(f"{self._unfit} {self._failed}".strip())
            self._sent.add(connection)
            pages = self._pages
            pages.senders += 1
        try:
            send_header(connection, {**order, "manifest": pages.manifest})
            send_fds(connection, pages.fds)
        finally:
            with self._lock:
                pages.senders -= 1
                unused = pages.unused()
            close_all(unused)

    def condemn(self, why: str) -> list[socket.socket]:
        """Stop sending these pages; return the connections of the processes that have them.

        Their descriptors are closed, at the latest when a send under way has ended, so that their
        memory is free for new pages once these processes ended.
        """
        with self._lock:
            self._unfit, self._failed = why, ""
            sent, self._sent = list(self._sent), weakref.WeakSet()
            old = self._pages.retire()
        close_all(old)
        return sent

    def renew(self) -> None:
        """Load the backbone into new pages, which are sent from now on.

        Raises ValueError where the model's folder is not what it was, and what the first load
        raises; condemned pages are then still sent to nobody.
        """
        try:
            manifest, fds, _ = self._load()
            if manifest["leaves"] != self.leaves:
                close_all(fds)
                raise ValueError(
                    f"The files of {self._model} have changed since they were loaded: restart "
                    "the agent."
                )
        except Exception as error:
            with self._lock:
                self._failed = str(error)
                self._lock.notify_all()
            raise
        with self._lock:
            if self._closed:
                old = fds
            else:
                old = self._pages.retire()
                self._pages, self._unfit = _Pages(manifest, fds), ""
            self._lock.notify_all()
        close_all(old)

    def close(self) -> None:
        """Close the descriptors; no `send` waits any more. A second call does nothing."""
        with self._lock:
            fds, self._closed = self._pages.retire(), True
            self._lock.notify_all()
        close_all(fds)

    def _load(self) -> tuple[dict[str, Any], list[int], str]:
        for attempt in range(_LOADS):
            try:
                return self._load_once()
            except ConnectionError as error:
                if attempt + 1 == _LOADS:
                    raise
                logger.warning("The backbone's process has ended; a backup loads it: %s", error)
        raise AssertionError("unreachable")

    def _load_once(self) -> tuple[dict[str, Any], list[int], str]:
        process, connection = spawn("serving.functions.backbone")
        try:
            with connection:
                send_header(connection, {"model": self._model, "dtype": self._dtype})
                answer = expect(connection, "manifest", process.pid, math.inf)
                fds = receive_fds(connection, len(answer["manifest"]["blocks"]))
                send_header(connection, {"received": len(fds)})
        finally:
            end_process(process)
        return answer["manifest"], fds, answer["device"]
