"""A function as its caller sees it: answers, restarts, and why one failed. No jax."""

import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from serving.api.outputs import BadRequest, RequestFailed, RequestOutput
from serving.api.sampling import Sampling
from serving.engine.inputs.generate_arguments import Prompt, as_list, broadcast, given_prompt
from serving.functions.messages import DeviceFull, error_of, output_of, sampling_fields
from serving.functions.policies.predict import Arrivals
from serving.functions.running import Running
from serving.functions.tenants import Tenant

logger = logging.getLogger(__name__)

_STARTS = 3  # without an answer in between, and a function is given up
_GIVEN_UP_S = 60.0  # until a call may try again
STATES = ("off", "starting", "running", "failed", "closed")


class FunctionDied(ConnectionError):
    """The function's process ended during a call, which may be tried again."""


class FunctionRefused(ConnectionError):
    """The function cannot run: its adapter or its sizes are not acceptable. The text says why."""


class Function:
    """One adapter, or the base model, in a process of its own; any thread may call any method.

    A process that ends is replaced. Calls under way raise FunctionDied; later ones wait for the
    new process. An offloaded function has no process until its next call, or `warm`.
    """

    def __init__(self, name: str, start: Callable[[], Running | Tenant], *, lazy: bool = False):
        """Start the first process; `start` returns one that is ready. Raises what it raises.

        A `lazy` function has none before its first call.
        """
        self.name, self._start = name, start
        self._ready = threading.Condition()
        self._closed = False
        self._failed: ConnectionError | None = None  # why it was given up
        self._failed_until = 0.0
        self._offloaded = True  # no process, and none is started before a call
        self.arrivals = Arrivals(begin=time.monotonic())  # of calls
        self._deaths = 0  # since the last answer
        self._running: Running | Tenant | None = None
        self.starts = 0  # processes that got ready
        if not lazy:
            self.begin()

    def __enter__(self) -> "Function":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Start a process where there is none, on this thread. Raises what its start raises.

        A function that does not begin is closed: other threads that wait for it get the reason.
        """
        with self._ready:
            if not self._offloaded:
                return
            self._offloaded = False
        try:
            self._adopt(self._start())
        except BaseException as error:
            with self._ready:
                self._closed, self._failed_until = True, math.inf
                self._failed = _reason(error)
                self._ready.notify_all()
            raise

    @property
    def pid(self) -> int:
        """Process id of the running process; waits while one starts."""
        return self._current().pid

    @property
    def about(self) -> dict[str, Any]:
        """Report of the running process when it was ready: seconds, bytes, sizes."""
        return self._current().about

    @property
    def start_times(self) -> dict[str, float]:
        """Seconds of the last start: `fork_s` until there is a process, with those of a new zygote;
        then `attach_s` of the backbone, and `start_s` until ready, from the process's begin.
        """
        return {key: self.about[key] for key in ("fork_s", "attach_s", "start_s")}

    @property
    def running(self) -> Running | Tenant | None:
        """The process that is ready now."""
        with self._ready:
            running = self._running
            return None if running is None or running.ended else running

    @property
    def state(self) -> str:
        """One of STATES."""
        with self._ready:
            if self._closed or self._failed:
                return "closed" if self._closed else "failed"
            if self._running is not None and not self._running.ended:
                return "running"
            return "off" if self._offloaded else "starting"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[RequestOutput]:
        """Return one answer per prompt, as `Engine.generate` does.

        A prompt is a text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`.
        `sampling` of None is the model's default; one applies to all prompts. Raises ValueError and
        TypeError for bad input, RequestFailed as `Engine.generate`, and FunctionDied.
        """
        given = [self._sent(prompt) for prompt in as_list(prompts)]
        fields: list[Any] = [None] * len(given)
        if sampling is not None:
            many = broadcast("sampling", sampling, len(given), (Sampling,))
            fields = [sampling_fields(one) for one in many]
        answer = self._call({"call": "generate", "prompts": given, "sampling": fields})
        return [output_of(output) for output in answer]

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[str]:
        """Return an iterator over the pieces of the answer's text as they are made.

        The call is sent before this returns; the iterator raises what `generate` raises.
        """
        (one,) = broadcast("sampling", sampling, 1, (Sampling, type(None)))
        fields = [None if one is None else sampling_fields(one)]
        call = {"call": "stream", "prompts": [self._sent(prompt)], "sampling": fields}
        return self._pieces(self._send(call))

    def _sent(self, prompt: Prompt) -> str | list[int] | dict[str, Any]:
        """Return a prompt as it is sent. Raises ValueError and TypeError for one that is none."""
        given = given_prompt(prompt)
        if given.images:
            raise ValueError(f"Function {self.name!r} takes no images: leave multi_modal_data out.")
        if given.ids is None:
            return given.text or ""
        ids = list(given.ids)
        return ids if given.text is None else {"prompt": given.text, "prompt_token_ids": ids}

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
    def is_offloaded(self) -> bool:
        """True if there is no process, and none is starting."""
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

    def called(self) -> None:
        """Note that a request has come, for the predicted rate."""
        self.arrivals.add(time.monotonic())

    def answered(self) -> None:
        """A call was answered: deaths before it count no more."""
        self._deaths = 0

    def connect(self) -> socket.socket | None:
        """Return a connection to the HTTP routes of the process, for the caller to close.

        None: no process is ready, or it does not take connections now; see `warm` and `state`.
        Never waits.
        """
        running = self.running
        return None if running is None else running.connect()

    def metrics_text(self, timeout_s: float) -> str:
        """Return the running process' metrics; "" where there is none, or no answer in time."""
        running = self.running
        answers = running.send({"call": "metrics"}) if running is not None else None
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=timeout_s).get("value", "") if answers is not None else ""
        return ""

    def _call(self, call: dict[str, Any]) -> Any:
        return self._value(self._send(call).get())

    def _send(self, call: dict[str, Any]) -> "queue.SimpleQueue[dict[str, Any]]":
        """Send a call to a process; return where its answers come."""
        self.called()
        while (answers := self._current().send(call)) is None:
            pass  # that process had ended before the call was sent
        return answers

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            self.answered()
            return answer["value"]
        if answer["error"] == "FunctionDied":
            why = answer.get("why", "ended during the call")
            raise FunctionDied(f"Function {self.name!r} {why}; try it again.")
        error = error_of(answer)
        if not isinstance(error, RequestFailed) or isinstance(error, BadRequest):
            self.answered()
        raise error

    def _current(self) -> Running | Tenant:
        with self._ready:
            if self._failed is not None and time.monotonic() >= self._failed_until:
                self._failed, self._deaths, self._offloaded = None, 0, True
            while not (self._closed or self._failed):
                if self._running is not None and not self._running.ended:
                    return self._running
                if self._offloaded:
                    self._offloaded = False
                    reason = "it has no process"
                    threading.Thread(target=self._restart, args=(reason,), daemon=True).start()
                self._ready.wait()
            if self._failed is None:
                raise ConnectionError(f"Function {self.name!r} is closed.")
            raise type(self._failed)(*self._failed.args)

    def _adopt(self, running: Running | Tenant) -> None:
        """Take a process that is ready, and watch it."""
        with self._ready:
            closed, self._running = self._closed, running
            self.starts += 1
            self._ready.notify_all()
        if closed:
            running.close()
        threading.Thread(
            target=self._watch, args=(running,), name=f"function-{self.name}", daemon=True
        ).start()

    def _watch(self, running: Running | Tenant) -> None:
        """Pass answers on until the process ends, then start another one."""
        running.read()
        with self._ready:
            if self._closed or self._running is not running:  # offloaded
                return
            self._running = None
        if not running.ended_by_others:
            self._deaths += 1
        self._restart(f"process {running.pid} has ended")

    def _restart(self, reason: str) -> None:
        """Start a process; after a few deaths and failures without an answer give up."""
        while self._deaths <= _STARTS and not self._closed:
            logger.info("Function %r: %s; a process is started.", self.name, reason)
            try:
                self._adopt(self._start())
                return
            except ValueError as error:  # another try ends the same way
                self._give_up(_reason(error))
                return
            except DeviceFull as error:
                self._give_up(error, 0.0)
                return
            except OSError as error:
                self._deaths += 1
                reason = str(error)
            except Exception as error:  # without this thread those that wait would never wake
                logger.exception("Function %r: its start failed in a way of its own.", self.name)
                self._give_up(_reason(error))
                return
        if self._closed:
            return
        text = f"Function {self.name!r} does not start: {reason}"
        self._give_up(ConnectionError(f"{text} ({self._deaths} times before an answer)."))

    def _give_up(self, why: ConnectionError, for_s: float | None = None) -> None:
        """Take no calls for some time: a process costs seconds, and others wait for them."""
        for_s = _GIVEN_UP_S if for_s is None else for_s
        logger.error("Function %r is given up for %g s: %s", self.name, for_s, why)
        with self._ready:
            self._failed, self._failed_until = why, time.monotonic() + for_s
            self._ready.notify_all()


def _reason(error: BaseException) -> ConnectionError:
    """Return what calls raise because of a start that failed."""
    if isinstance(error, ConnectionError):
        return error
    if isinstance(error, ValueError):
        return FunctionRefused(str(error))
    return ConnectionError(f"{type(error).__name__}: {error}")
