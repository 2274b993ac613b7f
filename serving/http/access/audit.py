"""The audit log: a line of JSON for each change, refusal and wrong key. Never a key or a prompt."""

import datetime
import json
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

REFUSALS_PER_S = 50.0  # lines about refusals; what is beyond that is counted


class AuditLog:
    """Appends to a file, which it opens for each line, so that log rotation may move it.

    Several processes may share the file. Without a path it writes nothing.
    """

    def __init__(self, path: str | None = None, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._left, self._seen, self._suppressed = REFUSALS_PER_S, clock(), 0

    def check(self) -> None:
        """Raise OSError when the file cannot be written."""
        if self._path is not None:
            os.close(self._open())

    def write(
        self,
        action: str,
        *,
        key: str,
        status: int,
        adapter: str | None = None,
        request_id: str = "",
        detail: str = "",
    ) -> None:
        """Write what happened: load, unload, rotation."""
        if self._path is None:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "key": key, "action": action, "adapter": adapter, "status": status}
        line["request_id"] = request_id
        if detail:
            line["detail"] = detail
        with self._lock:
            if self._suppressed:
                line["suppressed_before"], self._suppressed = self._suppressed, 0
            self._append(json.dumps(line))

    def refusal(self, action: str, *, key: str, status: int, **more: str | None) -> None:
        """Write a refusal, or only count it while too many come."""
        with self._lock:
            now = self._clock()
            left = min(REFUSALS_PER_S, self._left + (now - self._seen) * REFUSALS_PER_S)
            self._left, self._seen = max(0.0, left - 1), now
            if left < 1:
                self._suppressed += 1
                return
        self.write(action, key=key, status=status, **more)  # type: ignore[arg-type]

    def _append(self, text: str) -> None:
        try:
            descriptor = self._open()
            try:
                os.write(descriptor, text.encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.error("The audit log cannot be written: %s", error.strerror)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path or "", flags, 0o600)
