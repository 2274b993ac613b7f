"""Response parts that completions and chat share, whole or streamed."""

import contextlib
import dataclasses
import logging
import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from serving.http.access.observe import REQUEST_ID
from serving.http.answers.generation import ClientGone, Generation, Piece, usage_of
from serving.http.answers.json_pieces import json_response
from serving.http.answers.logprobs import token_text
from serving.http.answers.streaming import EventStream
from serving.http.errors import ApiError, after_checks
from serving.http.interface import AbstractTokenizer
from serving.http.lanes import Lane, run_in
from serving.http.requests.model_names import Target
from serving.http.requests.protocol import GenerationBody
from serving.http.server import Server
from serving.http.settings import HttpSettings

logger = logging.getLogger(__name__)
_SHORT = 2048  # tokens whose answer is written on the event loop
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it keeps the counters honest


class AbstractAnswer(ABC):
    """Builds the JSON of one answer from pieces; use it either whole or as chunks."""

    prefix: str
    stream_type: type[EventStream] = EventStream

    def __init__(self, generation: Generation, model: str):
        self.generation, self.model = generation, model
        self.usage = usage_of(generation)
        self.id = f"{self.prefix}{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.headers: dict[str, str] = {}

    def served_by(self, target: Target) -> None:
        """Let the answer name the version of an adapter that gives it; others stay as they are."""
        if target.version is not None:
            self.headers["X-Adapter-Version"] = target.version

    @abstractmethod
    def first(self) -> list[dict[str, Any]]:
        """Return the chunks that come before any text."""

    @abstractmethod
    def of(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of one piece."""

    def text_of_plain(self, piece: Piece) -> str | None:
        """Return the text of a piece whose chunk would have nothing else, and count its tokens.

        To be asked once such a chunk of the choice has gone out. None: `of` is to take it.
        """
        return None

    @abstractmethod
    def last(self) -> list[dict[str, Any]]:
        """Return the chunks that come after the text."""

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the chunks that end a stream whose answer failed."""
        return [error.body()]

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Keep a piece for the whole answer."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""


class AbstractChoices(AbstractAnswer):
    """An answer with a list of choices."""

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        body: GenerationBody,
        generation: Generation,
        model: str,
        tokenizer: AbstractTokenizer,
        settings: HttpSettings | None = None,
    ):
        super().__init__(generation, model)
        settings = settings or HttpSettings()
        as_ids = body.return_tokens_as_token_ids
        self.text_of = token_text(tokenizer, settings.tokens_as_ids if as_ids is None else as_ids)
        self.return_token_ids = bool(body.return_token_ids)
        options = body.stream_options
        wanted = bool(options and options.include_usage)
        self._include_usage = wanted or settings.force_include_usage
        self._continuous = bool(options and options.continuous_usage_stats) and self._include_usage
        self.is_plain = not (self.return_token_ids or self._continuous)  # a chunk is its text
        self._head = {"id": self.id, "created": self.created, "model": model}
        self._pieces: dict[int, list[Piece]] = {i: [] for i in range(generation.num_choices)}

    def served_by(self, target: Target) -> None:
        """Let the answer also have the version's digest."""
        super().served_by(target)
        if target.version is not None and target.entry is not None:
            self._head["system_fingerprint"] = target.entry.digest[:12]

    def named(self, request_id: str, given: str | None) -> None:
        """Let the answer's id end with that of the request, or with the one that its body gives.

        A `given` id that could not be a header's is left out.
        """
        is_usable = given is not None and REQUEST_ID.fullmatch(given)
        self.id = self._head["id"] = f"{self.prefix}{given if is_usable else request_id}"

    @abstractmethod
    def whole_choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Return one choice of the whole answer, made of all its pieces."""

    @abstractmethod
    def chunk_choice(self, piece: Piece) -> dict[str, Any] | None:
        """Return the choice of one chunk, or None when there is nothing to send."""

    def first(self) -> list[dict[str, Any]]:
        return []

    def add(self, piece: Piece) -> None:
        self.usage.add(piece)
        self._pieces[piece.index].append(piece)

    def whole(self) -> dict[str, Any]:
        choices = [self.whole_choice(i, pieces) for i, pieces in self._pieces.items()]
        head = {"object": self.whole_object, "system_fingerprint": None, **self._head}
        return head | {"choices": choices, "usage": self.usage.as_json()}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one chunk of the stream."""
        chunk = {"object": self.chunk_object, **self._head, "choices": choices}
        return chunk | {"usage": self.usage.as_json()} if self._continuous else chunk

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        self.usage.add(piece)
        choice = self.chunk_choice(piece)
        return [] if choice is None else [self.chunk([choice])]

    def text_of_plain(self, piece: Piece) -> str | None:
        delta = piece.delta
        if not self.is_plain or delta.finish_reason is not None:
            return None
        self.usage.completion_tokens += len(delta.token_ids)
        return delta.text

    def last(self) -> list[dict[str, Any]]:
        """Return the chunk with the usage if it was asked for."""
        if not self._include_usage:
            return []
        return [self.chunk([]) | {"usage": self.usage.as_json()}]


async def respond(
    request: Request, server: Server, answer: AbstractAnswer, stream: bool | None
) -> Response:
    """Return the answer at once or as a stream; the engine stops when the client goes."""
    silence_s = server.settings.keep_alive_s
    if server.settings.log_requests:
        logger.info("%s", request_line(request, answer, stream))
    if stream:
        return answer.stream_type(answer.generation, answer, silence_s, answer.headers)
    answer.generation.is_whole = True

    def keep(batch: list[Piece]) -> bool:
        for piece in batch:
            answer.add(piece)
        return True

    pieces = answer.generation.pieces(request.receive, silence_s, keep)
    try:
        async with contextlib.aclosing(pieces):
            async for batch in pieces:
                keep(batch)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    tokens = answer.usage.prompt_tokens + answer.usage.completion_tokens
    with after_checks():
        if tokens <= _SHORT:
            return json_response(answer.whole(), answer.headers)
        return await run_in(Lane.LONG, lambda: json_response(answer.whole(), answer.headers))


def request_line(request: Request, answer: AbstractAnswer, stream: bool | None) -> str:
    """Return what the log says of a request: names, numbers and sampling, never a word of it."""
    generation = answer.generation
    lengths = "+".join(str(len(prompt.ids)) for prompt in generation.prompts[:8])
    more = "+..." if len(generation.prompts) > 8 else ""
    sampling = generation.samplings[0]
    shown = [
        f"{field.name}={value}"
        for field in dataclasses.fields(sampling)
        if field.name not in ("stop", "bad_words", "logit_bias", "structured_outputs")
        and (value := getattr(sampling, field.name)) != field.default
        and value != ()
    ]
    return (
        f"Request {answer.id} to {request.url.path} for {answer.model}: {lengths}{more} prompt "
        f"tokens, {generation.num_choices} choices{', a stream' if stream else ''}; "
        + ", ".join(shown)
    )


def cache_salt(caller_salt: str, given: str | None) -> str:
    """Return the prefix-cache salt: the caller's own, and the request's on top."""
    return f"{caller_salt}@{given}" if given else caller_salt
