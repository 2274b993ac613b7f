"""The engine's side of one HTTP request: several prompts, each with n choices, one queue."""

import asyncio
import contextlib
import dataclasses
import enum
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from starlette.types import Receive

from lora_jax.adapters.entries import AdapterEntry
from serving.api.request import FinishReason, OutputDelta, QueueFull, TraceContext
from serving.api.sampling import Sampling
from serving.http.access.auth import limited
from serving.http.access.keys import Caller
from serving.http.access.rates import TokenBudget
from serving.http.answers.silence import Silence
from serving.http.errors import ApiError, from_exception, scrub
from serving.http.interface import AbstractEngine
from serving.http.requests.prompts import Prompt
from serving.runtime.mailbox import Inbox, Mailbox

_MOST_WAITING = 16384  # pieces for a client that does not read them; then its request ends
_AT_ONCE = 16  # prompts


class Piece(NamedTuple):
    """A delta of choice `index`, counted over all prompts of the HTTP request."""

    index: int
    prompt: Prompt
    delta: OutputDelta


Sink = Callable[[list[Piece]], bool]  # takes pieces at once; False: it has not touched them


class _Sign(enum.Enum):
    """Items of the queue that are no pieces."""

    GONE = "the client has closed its connection"
    SILENCE = "nothing has come for long"


class ClientGone(Exception):
    """The client closed its connection."""


class _SinkFailed(NamedTuple):
    """Item of the queue: a sink has raised."""

    error: Exception


class Generation:
    """Requests in the engine whose deltas arrive here; the engine's thread only appends."""

    def __init__(
        self,
        engine: AbstractEngine,
        mailbox: Mailbox,
        prompts: Sequence[Prompt],
        *,
        by_head: bool = False,
        trace: TraceContext | None = None,
    ):
        """`by_head`: the adapter's task head answers in place of the LM head. `trace` is that of
        the HTTP request.
        """
        self._engine, self._mailbox, self.by_head = engine, mailbox, by_head
        self._trace = trace
        self.prompts = tuple(prompts)
        self._loop = asyncio.get_running_loop()
        self._queue = _Arrivals(self._pour)
        self._sink: Sink | None = None  # while somebody waits for the queue
        self._silence: Silence | None = None
        self._running: dict[str, int] = {}  # request id -> choices not finished
        self.samplings: list[Sampling] = []  # of what was handed over, in order
        self._budget: TokenBudget | None = None
        self.num_choices = 0
        self.is_sending = False  # the client is slow to read while this lasts
        self.is_whole = False  # nothing is sent before the last piece, so that others wake nobody
        self._overrun = False

    def submit(
        self,
        adapter: str | None,
        samplings: Sequence[Sampling],
        cache_salt: str,
        caller: Caller | None = None,
        entry: AdapterEntry | None = None,
        grammar: Any = None,
    ) -> None:
        """Hand one request per prompt to the engine; when one is refused, none goes on.

        The caller's limits hold and its tokens are counted. `entry` is the adapter's, if known,
        and `grammar` that of the samplings' structured outputs.
        """
        submission = self._submission(adapter, cache_salt, caller, entry, grammar)
        with self._all_or_none():
            for prompt, sampling in zip(self.prompts, samplings, strict=True):
                self._submit_one(prompt, sampling, submission)

    async def submit_all(
        self,
        adapter: str | None,
        samplings: Sequence[Sampling],
        cache_salt: str,
        caller: Caller | None = None,
        entry: AdapterEntry | None = None,
        grammar: Any = None,
    ) -> None:
        """Do what `submit` does; the event loop goes on between prompts."""
        submission = self._submission(adapter, cache_salt, caller, entry, grammar)
        with self._all_or_none():
            for index, (prompt, sampling) in enumerate(zip(self.prompts, samplings, strict=True)):
                if index % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
                self._submit_one(prompt, sampling, submission)

    def _submission(
        self,
        adapter: str | None,
        cache_salt: str,
        caller: Caller | None,
        entry: AdapterEntry | None,
        grammar: Any,
    ) -> dict[str, Any]:
        """Return what all prompts have in common, once the caller's budget of tokens allows it."""
        self._budget = budget = caller.budget if caller else None
        if budget and (wait_s := budget.wait_s()):
            raise limited(f"tokens_per_minute={budget.per_minute:g}", wait_s)
        share = caller.share if caller else None
        given = {"adapter": adapter, "cache_salt": cache_salt, "share": share, "entry": entry}
        return given | {"grammar": grammar}

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Abort what was handed over when something fails."""
        try:
            yield
        except BaseException as error:
            self.abort()
            if isinstance(error, QueueFull | asyncio.CancelledError) or self._engine.is_alive():
                raise
            raise ApiError(503, "The engine has stopped.") from error

    def _submit_one(self, prompt: Prompt, sampling: Sampling, submission: dict[str, Any]) -> None:
        self.samplings.append(sampling)
        receiver = self._receiver(prompt, self.num_choices)
        more: dict[str, Any] = {"images": prompt.images} if prompt.images else {}
        more |= {"by_head": True} if self.by_head else {}
        more |= {"trace": self._trace} if self._trace is not None else {}
        request_id = self._engine.submit(
            prompt.ids, sampling=sampling, on_output=receiver, **submission, **more
        )
        if self._budget:
            self._budget.spend(len(prompt.ids))
        self._running[request_id] = sampling.n
        self.num_choices += sampling.n

    def _receiver(self, prompt: Prompt, first_index: int) -> Callable[[OutputDelta], None]:
        budget, put, loop, queue = self._budget, self._mailbox.put, self._loop, self._queue

        def on_output(delta: OutputDelta) -> None:
            if budget:
                budget.spend(len(delta.token_ids))
            if self.is_sending and queue.qsize() > _MOST_WAITING:
                self._overrun = True
                self._engine.abort(delta.request_id)
                return
            # Without the constructor, which takes as long as the rest.
            piece = tuple.__new__(Piece, (first_index + delta.index, prompt, delta))
            wakes = not self.is_whole or delta.finish_reason is not None
            put(loop, queue, piece, wakes=wakes)

        return on_output

    def abort(self) -> None:
        """Stop whatever still runs. Calling it again does nothing."""
        for request_id in self._running:
            self._engine.abort(request_id)
        self._running.clear()

    async def pieces(
        self, receive: Receive, silence_s: float, sink: Sink | None = None
    ) -> AsyncGenerator[list[Piece]]:
        """Yield what has arrived, in order; an empty list after `silence_s` without anything.

        Ends after the last choice. Raises ClientGone when the client goes, and ApiError 400,
        500 or 503 when a choice fails, 408 when it reads too slowly. Nothing runs on after that.

        What arrives while the caller waits goes to `sink` instead, without a wake-up, except for
        pieces that end a choice or have the prompt's log-probabilities. What it raises, this does.
        """
        watcher = asyncio.create_task(self._watch(receive))
        silence = Silence(self._loop, silence_s, lambda: self._queue.put_nowait(_Sign.SILENCE))
        try:
            while self._running:
                yield await self._next(silence, sink)
        finally:
            silence.close()
            watcher.cancel()
            self.abort()

    async def _next(self, silence: Silence, sink: Sink | None = None) -> list[Piece]:
        self._sink, self._silence = sink, silence
        silence.begin()
        try:
            items = [await self._queue.get()]
        finally:
            self._sink = None
            silence.end()
        if self._overrun:
            raise ApiError(408, "The client reads too slowly; the text was not kept for it.")
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        for item in items:
            if isinstance(item, _SinkFailed):
                raise item.error
        pieces = [item for item in items if isinstance(item, Piece)]
        if len(pieces) < len(items) and _Sign.GONE in items:
            raise ClientGone
        for piece in pieces:
            self._note(piece.delta)
        return pieces

    def _pour(self, pieces: list[Piece]) -> bool:
        """Give pieces of a burst to the sink; False where they belong into the queue.

        So do those that come behind others, or while the one who waits has been woken.
        """
        sink = self._sink
        if sink is None or self._silence is None or not self._queue.empty():
            return False
        for _, _, delta in pieces:
            if delta.finish_reason is not None or delta.prompt_logprobs is not None:
                return False
        try:
            is_taken = sink(pieces)
        except Exception as error:
            self._queue.put_nowait(_SinkFailed(error))
            return True
        if is_taken:
            self._silence.begin()
        return is_taken

    def _note(self, delta: OutputDelta) -> None:
        if delta.finish_reason is FinishReason.ERROR:
            message = delta.error or "The request failed."
            if delta.bad_request:
                raise from_exception(ValueError(message))
            raise ApiError(503 if delta.retryable else 500, scrub(message))
        if delta.finish_reason is not None and delta.request_id in self._running:
            self._running[delta.request_id] -= 1
            if not self._running[delta.request_id]:
                del self._running[delta.request_id]

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._queue.put_nowait(_Sign.GONE)


class _Arrivals(Inbox[Piece | _SinkFailed | _Sign]):
    """The queue of a generation, past which `pour` takes what it can."""

    def __init__(self, pour: Sink):
        super().__init__()
        self._pour = pour

    def take(self, items: list[Any]) -> None:
        if not self._pour(items):
            super().take(items)


@dataclasses.dataclass
class Usage:
    """Tokens of one HTTP request, as OpenAI reports them."""

    prompt_tokens: int
    completion_tokens: int = 0
    _cached: dict[int, int] = dataclasses.field(default_factory=dict)  # by id of the prompt

    def add(self, piece: Piece) -> None:
        """Count the tokens of one piece."""
        self.completion_tokens += len(piece.delta.token_ids)
        key = id(piece.prompt)
        self._cached[key] = max(self._cached.get(key, 0), piece.delta.num_cached_tokens)

    def as_json(self) -> dict:
        """Return the `usage` object of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def usage_of(generation: Generation) -> Usage:
    """Return the usage of a generation that has produced nothing yet."""
    return Usage(sum(len(prompt.ids) for prompt in generation.prompts))
