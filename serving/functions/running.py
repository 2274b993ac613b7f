"""One process of a function: its socket, and the calls that wait for answers. No jax."""

import contextlib
import itertools
import logging
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lora_jax.memory.wire import receive_header, send_fds, send_header

logger = logging.getLogger(__name__)

_BUSY_S = 0.1  # that a connection waits for another message to be sent

# Why a process has ended, in the error of its calls.
LACKED = "ran out of the device memory that was measured for it, and starts again with more"


class Running:
    """A process that is ready, as its agent sees it; any thread may call any method."""

    def __init__(self, connection: socket.socket, pid: int, about: dict[str, Any]):
        """`about` is what the process said when it was ready: seconds, bytes, sizes."""
        self.pid, self.about, self._connection = pid, about, connection
        self._lock = threading.Lock()  # calls and the process' end; nothing waits under it
        self._sending = threading.Lock()  # the connection, while it is written or closed
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._owners: dict[int, str] = {}  # of calls that wait, where several share the process
        self.ended = False
        self.has_answered = False  # a call of one of several owners
        # Called with the name and epoch of an adapter's process that no longer answers.
        self.on_lost: Callable[[str, int], None] = lambda name, epoch: None
        # Called where the process ends because it has run out of its device memory.
        self.on_lack: Callable[[], None] = lambda: None
        # Called with the number of an adapter in another process of which no step has rows.
        self.on_freed: Callable[[int], None] = lambda number: None
        # Called when `read` is at its end: the process is to leave.
        self.on_end: Callable[[], None] = lambda: None
        # Called with the bytes that the process alone holds, some time after it was ready.
        self.on_grown: Callable[[int], None] = lambda num_bytes: None

    def send(
        self, call: dict[str, Any], *, owner: str = "", fds: Sequence[int] = ()
    ) -> "queue.SimpleQueue[dict[str, Any]] | None":
        """Send a call; return where its answers come, None where the process has ended before.

        A process that ends in the middle answers FunctionDied. `owner` is the function of the call
        where several share the process; `fds` go with the call and stay the caller's to close.
        """
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self.ended:
                return None
            number = self._new_call(answers, owner)
        try:
            with self._sending:
                send_header(self._connection, {"id": number, **call})
                if fds:
                    send_fds(self._connection, fds)
        except OSError as error:  # `read` finds its end too, and answers
            if isinstance(error, BlockingIOError):
                logger.error("Process %d does not read its calls and is given up.", self.pid)
            with self._lock:
                self._shut_down()
        return answers

    def _new_call(self, answers: "queue.SimpleQueue[dict[str, Any]]", owner: str) -> int:
        number = next(self._numbers)
        self._waiting[number] = answers
        if owner:
            self._owners[number] = owner
        return number

    def has_calls(self, owner: str) -> bool:
        """True if calls of this owner are under way."""
        with self._lock:
            return owner in self._owners.values()

    def fail(self, owner: str) -> None:
        """Answer this owner's calls with FunctionDied; what the process says of them is dropped."""
        with self._lock:
            numbers = [number for number, name in self._owners.items() if name == owner]
            waiting = [self._waiting.pop(number) for number in numbers]
            for number in numbers:
                del self._owners[number]
        for answers in waiting:
            answers.put({"error": "FunctionDied"})

    def connect(self, *, owner: str = "") -> socket.socket | None:
        """Return a connection to the process, under way until it is closed; None: not now."""
        ours, theirs = socket.socketpair()
        with theirs:
            if self._is_open() and self._sending.acquire(timeout=_BUSY_S):
                try:
                    if self._hand_over(theirs, owner):
                        return ours
                finally:
                    self._sending.release()
        ours.close()
        return None

    def _hand_over(self, theirs: socket.socket, owner: str) -> bool:
        """Send the process its end of a connection; return whether it has it."""
        with self._lock:
            if self.ended or not self._takes_more():
                return False
            number = self._new_call(queue.SimpleQueue(), owner)
        try:
            send_header(self._connection, {"id": number, "call": "http"})
            send_fds(self._connection, [theirs.fileno()])
        except OSError:  # it has ended; `read` finds that too, and answers those who wait
            with self._lock:
                self.ended = True
                self._shut_down()
            return False
        return True

    def _is_open(self) -> bool:
        """Return whether the process reads: else a send waits; two messages fit where one may."""
        with self._lock:
            return not self.ended and self._takes_more()

    def _takes_more(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return bool(poll.poll(0))

    @property
    def is_idle(self) -> bool:
        """True if no call is under way."""
        with self._lock:
            return not self._waiting

    @property
    def own_pid(self) -> int | None:
        """Process id of a process that is one function's alone, as this one; else None."""
        return self.pid

    @property
    def ended_by_others(self) -> bool:
        """True if it ended with a process that other functions use too."""
        return False

    def end_if_idle(self) -> bool:
        """Let the process end unless calls are under way; return whether it does."""
        with self._lock:
            if self._waiting or self.ended:
                return False
            self.ended = True
            self._shut_down()
            return True

    def give_up(self) -> None:
        """Let the process end, and count it as ended from now on, not when `read` sees it."""
        with self._lock:
            self.ended = True
            self._shut_down()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def read(self) -> None:
        """Pass answers to waiting calls until the process has ended; every call gets an answer."""
        died = {"error": "FunctionDied"}
        try:
            while True:
                answer = receive_header(self._connection)
                if answer.get("lacks_memory"):
                    died["why"] = LACKED
                self._take(answer)
        except OSError:
            pass
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Of a message that no function sends.
            logger.error("Process %d has sent nonsense and is given up: %r", self.pid, error)
            self._shut_down()
        with self._lock:
            self.ended, waiting = True, list(self._waiting.values())
            self._waiting.clear()
            self._owners.clear()
            self._shut_down()  # a send under way ends
        with self._sending, self._lock:
            self._connection.close()
        for answers in waiting:
            answers.put(died)
        self.on_end()

    def _take(self, answer: dict[str, Any]) -> None:
        """Pass on what the process says unasked, or an answer to the call that waits for it."""
        if answer.get("lacks_memory"):
            self.on_lack()
        elif "private_bytes" in answer:
            self.on_grown(int(answer["private_bytes"]))
        elif "freed" in answer:
            self.on_freed(int(answer["freed"]))
        elif "lost" in answer:
            self.on_lost(answer["lost"], answer["epoch"])
        else:
            if "tenant" in answer:
                self.on_lost(answer["tenant"], answer["epoch"])
            if (answers := self._waiting_for(answer)) is not None:
                answers.put(answer)

    def _waiting_for(self, answer: dict[str, Any]) -> "queue.SimpleQueue[dict[str, Any]] | None":
        """Return where the call of an answer waits, and forget it with the last one."""
        with self._lock:
            number = answer["id"]
            if "piece" in answer:
                return self._waiting.get(number)
            owner = self._owners.pop(number, None)
            self.has_answered |= owner is not None and "value" in answer
            return self._waiting.pop(number, None)

    def close(self) -> None:
        """Let both sides read the connection's end."""
        with self._lock:
            if not self.ended:
                self._shut_down()
