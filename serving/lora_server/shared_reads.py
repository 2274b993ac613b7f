"""Reads of adapters' files that are under way, each of which has one thread. No jax."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

_LIMIT_S = 300.0  # as long as a request for an adapter waits


class SharedReads[T]:
    """Lets several threads that ask for one file share its read; any thread may use it.

    So a disk that hangs holds one thread for each adapter, however often requests ask again.
    """

    def __init__(self, limit_s: float = _LIMIT_S):
        """`limit_s` bounds the wait for another thread's read, from the beginning of the read."""
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, str], tuple[Future[T], float]] = {}

    def read(self, folder: str, digest: str, make: Callable[[], T]) -> T:
        """Return what `make` reads, or what another thread's `make` does that has begun before.

        Raises what that `make` raises, and ValueError when it has not ended in time.
        """
        key, own = (folder, digest), Future[T]()
        with self._lock:
            under_way = self._under_way.get(key)
            if under_way is None:
                self._under_way[key] = own, time.monotonic()
        if under_way is not None:
            return self._awaited(folder, *under_way)
        try:
            value = make()
        except BaseException as error:
            self._leave(key)
            own.set_exception(error)
            raise
        self._leave(key)
        own.set_result(value)
        return value

    def _awaited(self, folder: str, future: Future[T], begun_s: float) -> T:
        wait([future], max(0.0, begun_s + self._limit_s - time.monotonic()))
        if not future.done():
            raise ValueError(
                f"The LoRA Server has been reading the adapter's folder {folder} for "
                f"{time.monotonic() - begun_s:.0f} s: look at the disk of its host, then ask again."
            )
        return future.result()

    def _leave(self, key: tuple[str, str]) -> None:
        with self._lock:
            del self._under_way[key]
