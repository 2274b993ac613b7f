"""Counts the programs that chosen threads compile; after warm-up there should be none."""

import threading
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Listens to jax until closed. Compiling happens in the thread that calls the program."""

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def watch_this_thread(self) -> None:
        """Count what the calling thread compiles from now on."""
        self._threads.add(threading.get_ident())

    def ignore_this_thread(self) -> None:
        """Count no more of the calling thread, whose identity may be reused when it ends."""
        self._threads.discard(threading.get_ident())

    def close(self) -> None:
        """Stop listening."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _EVENT and threading.get_ident() in self._threads:
            self.count += 1
