"""A function as its caller sees it: answers, restarts, and why one failed. No jax."""

import collections
import contextlib
import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lora_jax.memory.wire import receive_header, send_header
from serving.api.outputs import RequestFailed, RequestOutput
from serving.api.sampling import Sampling
from serving.functions.messages import output_of, sampling_fields
from serving.functions.policies.predict import GAPS

logger = logging.getLogger(__name__)

_ERRORS = {error.__name__: error for error in (ValueError, TypeError, KeyError)}
_STARTS = 3  # without an answer in between, and a function is given up


class FunctionDied(ConnectionError):
    """The function's process ended during a call, which may be tried again."""


class Function:
    """One adapter, or the base model, in a process of its own; any thread may call any method.

    A process that ends is replaced. Calls under way raise FunctionDied; later ones wait for the
    new process. An offloaded function has no process until its next call, or `warm`.
    """

    def __init__(self, name: str, start: Callable[[], "Running"]):
        """Start the first process; `start` returns one that is ready. Raises what it raises."""
        self.name, self._start = name, start
        self._ready = threading.Condition()
        self._closed, self._failed = False, ""
        self._offloaded = False  # no process, and none is started before a call
        self._created = time.monotonic()
        self._arrivals: collections.deque[float] = collections.deque(maxlen=GAPS + 1)
        self._deaths = 0  # since the last answer
        self._running: Running | None = None
        self._adopt(start())

    def __enter__(self) -> "Function":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the running process; waits while one starts."""
        return self._current().pid

    @property
    def start_times(self) -> dict[str, float]:
        """Seconds of the last start: `attach_s` of the backbone, `start_s` until ready."""
        return self._current().times

    def generate(
        self,
        prompts: str | Sequence[Any],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[RequestOutput]:
        """Return one answer per prompt, as `Engine.generate` does.

        A prompt is a text or a list of token ids. Raises ValueError for bad input, RequestFailed,
        and FunctionDied.
        """
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        if given and isinstance(given[0], int):
            given = [given]
        many = [sampling or Sampling()] if isinstance(sampling, Sampling | None) else sampling
        fields = [sampling_fields(one) for one in many]
        fields = fields * len(given) if len(fields) == 1 else fields
        answer = self._call({"call": "generate", "prompts": given, "sampling": fields})
        return [output_of(output) for output in answer]

    def stream(self, prompt: Any, sampling: Sampling | None = None) -> Iterator[str]:
        """Return an iterator over the pieces of the answer's text as they are made.

        The call is sent before this returns; the iterator raises what `generate` raises.
        """
        fields = [sampling_fields(sampling or Sampling())]
        call = {"call": "stream", "prompts": [prompt], "sampling": fields}
        return self._pieces(self._send(call))

    def _pieces(self, answers: "queue.SimpleQueue[dict[str, Any]]") -> Iterator[str]:
        while "piece" in (answer := answers.get()):
            yield answer["piece"]
        self._value(answer)

    def changed(self) -> list[str]:
        """Return names of backbone arrays whose bytes are not the published ones; reads all."""
        return self._call({"call": "changed"})

    def memory(self) -> dict[str, int]:
        """Return bytes of the backbone's map in the process (Size) and its share of them (Pss)."""
        return self._call({"call": "memory"})

    @property
    def arrivals(self) -> tuple[float, ...]:
        """Times of the last few calls, by time.monotonic; of the first start before any."""
        return tuple(self._arrivals) or (self._created,)

    @property
    def is_offloaded(self) -> bool:
        """Whether there is no process, and none on its way."""
        return self._offloaded

    def offload(self) -> bool:
        """End the process if no call is under way; return whether there is none now.

        Its KV pages, adapter and programs go; the next call starts another one.
        """
        with self._ready:
            running = self._running
            if running is not None and not self._closed and running.end_if_idle():
                self._offloaded, self._running = True, None
            return self._offloaded

    def warm(self) -> None:
        """Return when there is a process that is ready."""
        self._current()

    def close(self) -> None:
        """End the process; calls under way fail. A second call does nothing."""
        with self._ready:
            self._closed, running = True, self._running
            self._ready.notify_all()
        if running is not None:
            running.close()

    def _call(self, call: dict[str, Any]) -> Any:
        return self._value(self._send(call).get())

    def _send(self, call: dict[str, Any]) -> "queue.SimpleQueue[dict[str, Any]]":
        """Send a call to a process; return where its answers come."""
        self._arrivals.append(time.monotonic())
        while (answers := self._current().send(call)) is None:
            pass  # that process had ended before the call was sent
        return answers

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            self._deaths = 0
            return answer["value"]
        if answer["error"] == "FunctionDied":
            raise FunctionDied(f"Function {self.name!r} ended during the call; try it again.")
        if answer["error"] in _ERRORS:
            self._deaths = 0
            raise _ERRORS[answer["error"]](answer["text"])
        raise RequestFailed(answer["text"], retryable=answer["retryable"])

    def _current(self) -> "Running":
        with self._ready:
            while not (self._closed or self._failed):
                if self._running is not None and not self._running.ended:
                    return self._running
                if self._offloaded:
                    self._offloaded = False
                    reason = "it was offloaded"
                    threading.Thread(target=self._restart, args=(reason,), daemon=True).start()
                self._ready.wait()
            state = "is closed." if self._closed else f"does not start: {self._failed}"
            raise ConnectionError(f"Function {self.name!r} {state}")

    def _adopt(self, running: "Running") -> None:
        """Take a process that is ready, and watch it."""
        with self._ready:
            closed, self._running = self._closed, running
            self._ready.notify_all()
        if closed:
            running.close()
        threading.Thread(
            target=self._watch, args=(running,), name=f"function-{self.name}", daemon=True
        ).start()

    def _watch(self, running: "Running") -> None:
        """Pass answers on until the process ends, then start another one."""
        running.read()
        with self._ready:
            if self._closed or self._running is not running:  # offloaded
                return
            self._running = None
        self._deaths += 1
        self._restart(f"process {running.pid} has ended")

    def _restart(self, reason: str) -> None:
        """Start a process; after a few deaths and failures without an answer give up."""
        while self._deaths <= _STARTS and not self._closed:
            logger.info("Function %r: %s; a process is started.", self.name, reason)
            try:
                self._adopt(self._start())
                return
            except (ValueError, OSError) as error:
                self._deaths += 1
                reason = str(error)
        with self._ready:
            self._failed = f"{reason} ({self._deaths} times before an answer)."
            self._ready.notify_all()


class Running:
    """One process of a function: its socket, and the calls that wait for answers."""

    def __init__(self, connection: socket.socket, pid: int, times: dict[str, float]):
        self.pid, self.times, self._connection = pid, times, connection
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.ended = False

    def send(self, call: dict[str, Any]) -> "queue.SimpleQueue[dict[str, Any]] | None":
        """Send a call; return where its answers come, None where the process has ended before.

        A process that ends in the middle answers FunctionDied.
        """
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self.ended:
                return None
            number = next(self._numbers)
            self._waiting[number] = answers
            try:
                send_header(self._connection, {"id": number, **call})
            except OSError:  # `read` finds its end too, and answers
                self._shut_down()
        return answers

    def end_if_idle(self) -> bool:
        """Let the process end unless calls are under way; return whether it does."""
        with self._lock:
            if self._waiting or self.ended:
                return False
            self.ended = True
            self._shut_down()
            return True

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def read(self) -> None:
        """Pass answers to those who wait, until the process has ended; they all get an answer."""
        try:
            while True:
                answer = receive_header(self._connection)
                with self._lock:
                    number = answer["id"]
                    last = "piece" not in answer
                    answers = self._waiting.pop(number, None) if last else self._waiting.get(number)
                if answers is not None:
                    answers.put(answer)
        except OSError:
            pass
        with self._lock:
            self.ended, waiting = True, list(self._waiting.values())
            self._waiting.clear()
            self._connection.close()
        for answers in waiting:
            answers.put({"error": "FunctionDied"})

    def close(self) -> None:
        """Let both sides read the connection's end."""
        with self._lock:
            if not self.ended:
                self._shut_down()
