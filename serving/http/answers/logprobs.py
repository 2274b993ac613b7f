"""Log-probabilities in the shapes of the two OpenAI APIs."""

from collections.abc import Callable, Sequence
from typing import Any

from serving.api.request import TokenLogprobs
from serving.http.interface import AbstractTokenizer

LOWEST = -9999.0  # JSON has no infinity; vLLM's stand-in
TokenText = Callable[[int], str]


def token_text(tokenizer: AbstractTokenizer, as_ids: bool) -> TokenText:
    """Return how a token is shown: what it adds to a text, or `token_id:N`."""
    if as_ids:
        return lambda token: f"token_id:{token}"
    return tokenizer.token_text


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return max(LOWEST, logprob)


class CompletionLogprobs:
    """The `logprobs` objects of one choice; text offsets run on from one to the next."""

    def __init__(self, text_of: TokenText):
        self._text_of = text_of
        self._offset = 0

    def render(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """Return text_offset, token_logprobs, tokens and top_logprobs of the next tokens."""
        answer: dict[str, list[Any]] = {
            key: [] for key in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        for token, logprob in zip(ids, logprobs, strict=True):
            text = self._text_of(token)
            answer["tokens"].append(text)
            answer["text_offset"].append(self._offset)
            answer["token_logprobs"].append(None if logprob is None else finite(logprob.logprob))
            answer["top_logprobs"].append(None if logprob is None else self._top(text, logprob))
            self._offset += len(text)
        return answer

    def _top(self, text: str, logprob: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by text, and the token itself where it is not one of them."""
        top: dict[str, float] = {}
        for token, value in logprob.top.items():
            top.setdefault(self._text_of(token), finite(value))
        top.setdefault(text, finite(logprob.logprob))
        return top


def chat_logprobs(text_of: TokenText, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
    """Return the `logprobs` object of a chat choice."""

    def entry(token: int, value: float) -> dict[str, Any]:
        text = text_of(token)
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode())}

    return {
        "content": [
            entry(item.token_id, item.logprob)
            | {"top_logprobs": [entry(token, value) for token, value in item.top.items()]}
            for item in logprobs
        ]
    }


def prompt_logprobs(
    text_of: TokenText, logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: per token the likeliest ids and the token's own."""

    def as_dict(item: TokenLogprobs | None) -> dict[str, Any] | None:
        if item is None:
            return None
        entries = {
            token: {"logprob": finite(value), "rank": rank}
            for rank, (token, value) in enumerate(item.top.items(), 1)
        }
        entries[item.token_id] = {"logprob": finite(item.logprob), "rank": item.rank}
        return {str(t): entry | {"decoded_token": text_of(t)} for t, entry in entries.items()}

    return [as_dict(item) for item in logprobs]
