"""Reads the keys file again when it changes, or on SIGHUP: keys come and go without a restart."""

import logging
import os
import signal
import threading
from typing import Any

from serving.http.access.audit import AuditLog
from serving.http.access.key_file import read_keys_file
from serving.http.access.keys import KeyRing

logger = logging.getLogger(__name__)

EVERY_S = 1.0


class KeyWatch:
    """A thread that looks at the file each second, from `__enter__` to `__exit__`.

    A file that is not acceptable changes nothing: the keys before it stay valid, and the log says
    why.
    """

    def __init__(self, path: str, ring: KeyRing, audit: AuditLog):
        self._path, self._ring, self._audit = path, ring, audit
        self._seen: tuple[int, ...] | None = self._mark()
        self._woken, self._ending = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="keys", daemon=True)
        self._before: Any = None

    def __enter__(self) -> "KeyWatch":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGHUP, lambda *_: self.wake())
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending = True
        self._woken.set()
        self._thread.join()
        if self._before is not None:
            signal.signal(signal.SIGHUP, self._before)

    def wake(self) -> None:
        """Read the file now, changed or not."""
        self._seen = None
        self._woken.set()

    def look(self) -> None:
        """Read the file if it is another one than last time."""
        mark = self._mark()
        if mark == self._seen:
            return
        self._seen = mark
        try:
            tenants = read_keys_file(self._path)
            self._ring.set_tenants(tenants)
        except (ValueError, OSError) as error:
            why = str(error) if isinstance(error, ValueError) else error.strerror
            logger.error("The keys file was rejected, the previous keys stay valid: %s", why)
            self._audit.write("rotation", key="", status=400, detail=str(why))
            return
        logger.info("The keys file was read again: %d keys.", len(tenants))
        self._audit.write("rotation", key="", status=200, detail=f"{len(tenants)} keys")

    def _run(self) -> None:
        while not self._ending:
            self.look()
            self._woken.wait(EVERY_S)
            self._woken.clear()

    def _mark(self) -> tuple[int, ...]:
        """Return what changes with the file; (): it cannot be seen."""
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode, status.st_uid
