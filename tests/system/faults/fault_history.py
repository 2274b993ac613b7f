"""Record of a run under faults: operations with their outcomes, and the faults."""

import dataclasses
import threading

BASE = "base"
ABSENT = None  # the content of a name that stands for no adapter

# How an operation ended.
ANSWERED = "answered"  # a whole answer with status 2xx
TOLD = "told"  # an error status, or an error event in a stream
CUT = "cut"  # the connection ended before either
SILENT = "silent"  # the client gave up
REFUSED = "refused"  # nobody listened, so that it had no effect


@dataclasses.dataclass(frozen=True)
class Operation:
    """One request. Times are seconds of one clock; `tokens` are those of an answered ask."""

    kind: str  # "ask", "load", "unload"
    name: str  # model that was asked, adapter that was loaded
    start_s: float
    end_s: float
    outcome: str
    status: int = 0
    content: str | None = None  # folder that was loaded
    prompt: int = 0
    tokens: tuple[int, ...] = ()
    where: str = "front"
    text: str = ""  # of an error


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. It began, its cause ended, and later every role was well again."""

    kind: str  # "kill", "stop", "slow", "full disk", "restart"
    role: str  # "instance 0", "rank 1", "front", "disk"
    start_s: float
    end_s: float
    recovered_s: float

    @property
    def takes_the_front(self) -> bool:
        """Whether nobody could answer while it lasted."""
        return self.role == "front"


class Recorder:
    """Collects operations of many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: list[Operation] = []

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._operations.append(operation)

    def take(self) -> list[Operation]:
        """Return what there is, in order of starts."""
        with self._lock:
            return sorted(self._operations, key=lambda operation: operation.start_s)
