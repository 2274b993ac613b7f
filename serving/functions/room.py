"""Memory of functions' processes under one limit (ServerlessLoRA, Eq. 1, 2, 7 and 8). No jax.

A process says what memory it alone holds when it is ready, and some seconds later, when it has
read all of its programs; the agent bounds that by what it can see, and looks again before it makes
room. A function that has had none yet is taken for the largest that was seen.
"""

import threading
from collections.abc import Callable, Mapping

from serving.functions.handle import DeviceFull, Function
from serving.functions.policies import preload
from serving.functions.policies.artifacts import Artifact, Place
from serving.functions.policies.offload import NoRoomError, Resident, plan

_PLANS = 4  # functions that were to leave may be called meanwhile


class Room:
    """Makes room for a process by ending idle ones of little value; any thread may call."""

    def __init__(
        self,
        limit_bytes: int | None,
        seen_bytes: Callable[[Function], int] = lambda function: 0,
    ):
        """`seen_bytes` returns the least that a function's process holds, by what can be seen."""
        self._limit, self._seen_bytes = limit_bytes, seen_bytes
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}  # the most that a process of each function held
        self._start_s: dict[str, float] = {}
        # Starts that have room for a process, by the number of the function's earlier ones.
        self._admitted: dict[str, int] = {}

    @property
    def limit(self) -> int | None:
        """Bytes that all processes may have together; None: any."""
        return self._limit

    def ready(self, name: str, start_s: float) -> None:
        """A process of the function is ready, and took so long."""
        with self._lock:
            self._start_s[name] = start_s

    def failed(self, name: str) -> None:
        """A start of the function that had room has failed: it holds none."""
        with self._lock:
            self._admitted.pop(name, None)

    def grown(self, name: str, num_bytes: int) -> None:
        """A process of the function holds so many bytes; the most that one held counts."""
        with self._lock:
            self._bytes[name] = max(num_bytes, self._bytes.get(name, 0))

    def worth_starting(self, functions: Mapping[str, Function], now: float) -> list[str]:
        """Return functions without a process that one is worth its room for ahead of its call.

        Those expected by their rate; under a limit those of the best plan (Eq. 1, 2) for what is
        not in use, best first, as far as their room takes no other planned function's.
        """
        rates = {name: f.arrivals.predicted_rate(now) for name, f in functions.items()}
        off = [n for n, f in functions.items() if f.is_offloaded and rates[n] > 0]
        if self._limit is None or not off:
            return off
        with self._lock:
            held = [f for f in functions.values() if self._holds(f)]
            idle = {f.name for f in held if f.running is not None and f.running.is_idle}
            free = self._limit - sum(self._held(f.name) for f in held if f.name not in idle)
            known = [name for name in (*idle, *off) if self._held(name)]
            parts = [
                Artifact(name, self._held(name), (name,), device_s=self._start_s.get(name, 1.0))
                for name in known
            ]
            loads = preload.plan(parts, rates, [Place("processes", max(free, 0), True)])
            planned = [load.artifact for load in loads]
            free -= sum(self._held(name) for name in idle if name in planned)
            chosen = []
            for name in planned:
                if name not in idle and self._held(name) <= free:
                    free -= self._held(name)
                    chosen.append(name)
        return chosen

    def make(self, name: str, functions: Mapping[str, Function]) -> None:
        """Return when a process of the function has room. Raises DeviceFull."""
        if self._limit is None:
            return
        for function in functions.values():  # one may hold more than it has said
            self.grown(function.name, self._seen_bytes(function))
        with self._lock:
            for _ in range(_PLANS):
                need = self._held(name) - self._limit
                others = [f for n, f in functions.items() if n != name and self._holds(f)]
                need += sum(self._held(f.name) for f in others)
                residents = [self._resident(f) for f in others]
                try:
                    leaving = plan(residents, need)
                except NoRoomError as error:
                    raise DeviceFull(
                        f"There is no room for function {name!r} within functions_memory_bytes "
                        f"{self._limit}: {error} Try again when others are idle."
                    ) from None
                if all(functions[other].offload() for other in leaving):
                    own = functions.get(name)
                    self._admitted[name] = 0 if own is None else own.starts
                    return
        raise DeviceFull(f"Functions that were to make room for {name!r} are called; try again.")

    def _held(self, name: str) -> int:
        return self._bytes.get(name) or max(self._bytes.values(), default=0)

    def _holds(self, function: Function) -> bool:
        """Return whether a function has a process, or a start that was let in and is under way."""
        state, let_in = function.state, self._admitted.get(function.name)
        return state == "running" or (state == "starting" and let_in == function.starts)

    def _resident(self, function: Function) -> Resident:
        running = function.running
        start_s = 0.0 if running is None else self._start_s.get(function.name, 0.0)
        value = start_s * function.arrivals.rate()
        in_use = running is None or not running.is_idle
        return Resident(function.name, max(1, self._held(function.name)), value, in_use)
