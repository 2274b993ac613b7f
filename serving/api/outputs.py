"""Results of `Engine.generate`, gathered from deltas. No jax."""

import dataclasses

from lora_jax.adapters.composition import versions_in
from lora_jax.adapters.task_head import HeadAnswer
from serving.api.request import FinishReason, OutputDelta, TokenLogprobs


class RequestFailed(RuntimeError):
    """A request ended with an error after it was taken: HTTP 500, or 503 if `retryable`.

    `retryable` says that the same request may succeed later. The server is at fault unless the
    error is a `BadRequest`.
    """

    def __init__(self, message: str, *, retryable: bool = False):
        super().__init__(message)
        self.retryable = retryable


class BadRequest(RequestFailed, ValueError):
    """The request itself is at fault and fails whenever it is sent: HTTP 400.

    It is a ValueError, as is what `submit` and `generate` raise for a request that they do not
    take: whoever catches ValueError has all bad requests.
    """


def failure(delta: OutputDelta) -> RequestFailed:
    """Return the exception for the last delta of a choice that ended with an error."""
    message = delta.error or "The request failed."
    if delta.bad_request:
        return BadRequest(message)
    return RequestFailed(message, retryable=delta.retryable)


@dataclasses.dataclass(frozen=True)
class Completion:
    """One choice of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id when asked for
    head: HeadAnswer | None = None  # of the adapter's task head, if that was asked

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the whole answer, None where none were asked for."""
        return sum(entry.logprob for entry in self.logprobs) if self.logprobs else None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The answer to one prompt, choices in order of their index."""

    request_id: str
    prompt_ids: tuple[int, ...]
    adapter: str | None
    outputs: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    prompt: str | None = None  # its text, where it came as text
    adapter_version: str | None = None  # that served it; of a sum: `sql@v2, formal@v1`

    @property
    def finished(self) -> bool:
        """True if every choice has ended; while an answer is made its outputs are parts."""
        return all(choice.finish_reason is not None for choice in self.outputs)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """vLLM's name of `prompt_ids`."""
        return self.prompt_ids


class OutputCollector:
    """Gathers the deltas of one request; its output may be looked at before the last of them."""

    def __init__(
        self, prompt_ids: tuple[int, ...], adapter: str | None, n: int, prompt: str | None = None
    ):
        self._prompt_ids, self._adapter, self._prompt = prompt_ids, adapter, prompt
        self._choices = [_Choice(index) for index in range(n)]
        self._open = n
        self._last: OutputDelta | None = None
        self._failed: OutputDelta | None = None
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._num_cached_tokens = 0

    @property
    def done(self) -> bool:
        """True if every choice has had its last delta."""
        return not self._open

    def add(self, delta: OutputDelta) -> None:
        """Take the next delta of any choice."""
        self._choices[delta.index].add(delta)
        self._last = delta
        self._open -= delta.finish_reason is not None
        if delta.finish_reason is FinishReason.ERROR:
            self._failed = self._failed or delta
        if self._prompt_logprobs is None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)

    def output(self) -> RequestOutput:
        """Return the answer so far.

        Raises:
            BadRequest: a choice ended with an error of the request.
            RequestFailed: a choice ended with another error.
            ValueError: there was no delta yet.
        """
        if self._failed is not None:
            raise failure(self._failed)
        if self._last is None:
            raise ValueError("The request has no output yet.")
        return RequestOutput(
            request_id=self._last.request_id,
            prompt_ids=self._prompt_ids,
            adapter=self._adapter,
            outputs=tuple(choice.completion() for choice in self._choices),
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            prompt=self._prompt,
            adapter_version=versions_in(self._last.adapter or ""),
        )


class _Choice:
    """The text of one choice so far."""

    def __init__(self, index: int):
        self._index = index
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._head: HeadAnswer | None = None

    def add(self, delta: OutputDelta) -> None:
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        self._head = delta.head

    def completion(self) -> Completion:
        self._text = ["".join(self._text)]  # so that looking often joins each piece once
        return Completion(
            index=self._index,
            text=self._text[0],
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            logprobs=tuple(self._logprobs),
            head=self._head,
        )
