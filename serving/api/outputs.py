"""Results of `Engine.generate`, gathered from deltas. No jax."""

import dataclasses

from lora_jax.adapters.versions import split
from serving.api.request import FinishReason, OutputDelta, TokenLogprobs


class RequestFailed(RuntimeError):
    """A request ended with an error. `retryable` says that it may succeed later."""

    def __init__(self, message: str, *, retryable: bool):
        super().__init__(message)
        self.retryable = retryable


@dataclasses.dataclass(frozen=True)
class Completion:
    """One choice of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id when asked for

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
    adapter_version: str | None = None  # that served it, where the adapter has versions

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """vLLM's name of `prompt_ids`."""
        return self.prompt_ids


class OutputCollector:
    """Gathers the deltas of one request."""

    def __init__(
        self, prompt_ids: tuple[int, ...], adapter: str | None, n: int, prompt: str | None = None
    ):
        self._prompt_ids, self._adapter, self._prompt = prompt_ids, adapter, prompt
        self._deltas: list[list[OutputDelta]] = [[] for _ in range(n)]
        self._open = n

    @property
    def done(self) -> bool:
        """True if every choice has had its last delta."""
        return not self._open

    def add(self, delta: OutputDelta) -> None:
        """Take the next delta of any choice."""
        self._deltas[delta.index].append(delta)
        self._open -= delta.finish_reason is not None

    def output(self) -> RequestOutput:
        """Return the whole answer; raises RequestFailed when a choice ended with an error."""
        deltas = [delta for choice in self._deltas for delta in choice]
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise RequestFailed(delta.error or "The request failed.", retryable=delta.retryable)
        scored = [d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None]
        return RequestOutput(
            request_id=deltas[0].request_id,
            prompt_ids=self._prompt_ids,
            adapter=self._adapter,
            outputs=tuple(_completion(i, choice) for i, choice in enumerate(self._deltas)),
            prompt_logprobs=scored[0] if scored else None,
            num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
            prompt=self._prompt,
            adapter_version=split(deltas[0].adapter or "")[1],
        )


def _completion(index: int, deltas: list[OutputDelta]) -> Completion:
    return Completion(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )
