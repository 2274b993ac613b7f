"""POST /v1/chat/completions."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.http.answers.answers import AbstractChoices, respond
from serving.http.answers.chat_generation import chat_generation
from serving.http.answers.generation import Generation, Piece
from serving.http.answers.logprobs import chat_logprobs, prompt_logprobs
from serving.http.answers.message_reader import MessageReader, reader_of
from serving.http.interface import AbstractTokenizer
from serving.http.requests.body import read_body, takes
from serving.http.requests.protocol import ChatBody
from serving.http.server import server_of
from serving.http.settings import HttpSettings

router = APIRouter()
_THOUGHTS = "reasoning_content"  # vLLM's name before 0.12; later ones say reasoning


@router.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
async def create_chat_completion(request: Request) -> Response:
    """Return the assistant's next message, at once or as a stream."""
    server = server_of(request)
    body = await read_body(request, ChatBody)
    generation = await chat_generation(request, server, body)
    answer = ChatAnswer(
        body,
        generation.generation,
        generation.target.name,
        generation.tokenizer,
        server.settings,
        generation.role,
        generation.echo,
    )
    answer.served_by(generation.target)
    answer.named(request.state.request_id, body.request_id)
    return await respond(request, server, answer, body.stream)


class ChatAnswer(AbstractChoices):
    """`chat.completion` objects and their chunks."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatBody,
        generation: Generation,
        model: str,
        tokenizer: AbstractTokenizer,
        settings: HttpSettings,
        role: str,
        echo: str,
    ):
        """`echo` is the text that comes before the answer's own."""
        super().__init__(body, generation, model, tokenizer, settings)
        self._role, self._echo = role, echo
        self._wants_logprobs = bool(body.logprobs)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self.is_plain &= not self._wants_logprobs
        self._wants_thoughts = body.include_reasoning is not False
        self._make_reader = reader_of(body, settings, generation)
        self._readers: dict[int, MessageReader] = {}

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, with what belongs to the prompt beside the choices."""
        answer = super().whole()
        if self.return_token_ids:
            answer["prompt_token_ids"] = self.generation.prompts[0].ids
        if self._wants_prompt_logprobs:
            first = self._pieces[0][0].delta.prompt_logprobs or ()
            answer["prompt_logprobs"] = prompt_logprobs(self.text_of, first)
        return answer

    def whole_choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Return message, logprobs and finish of one choice."""
        last = pieces[-1].delta
        text = "".join(piece.delta.text for piece in pieces)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": self._role},
            "logprobs": None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        reader = self._reader(index)
        choice["message"] |= self._shown(reader.whole(text, self._echo))
        choice["finish_reason"] = reader.finish(last.finish_reason)
        if self._wants_logprobs:
            logprobs = [x for piece in pieces for x in piece.delta.logprobs]
            choice["logprobs"] = chat_logprobs(self.text_of, logprobs)
        if self.return_token_ids:
            choice["token_ids"] = [t for piece in pieces for t in piece.delta.token_ids]
        return choice

    def first(self) -> list[dict[str, Any]]:
        """Return one chunk with the role per choice, and one with what is echoed."""
        deltas = [{"role": self._role, "content": ""}]
        deltas += [{"content": self._echo}] if self._echo else []
        chunks = [
            self.chunk([self._chunk_choice(i, delta)])
            for delta in deltas
            for i in range(self.generation.num_choices)
        ]
        if self.return_token_ids:
            chunks[0]["prompt_token_ids"] = self.generation.prompts[0].ids
        return chunks

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunk of a piece; the prompt's log-probabilities stand beside its choice."""
        chunks, logprobs = super().of(piece), piece.delta.prompt_logprobs
        if self._wants_prompt_logprobs and piece.index == 0 and logprobs is not None:
            chunks = chunks or [self.chunk([self._chunk_choice(0, {})])]
            chunks[0]["prompt_logprobs"] = prompt_logprobs(self.text_of, logprobs)
        return chunks

    def text_of_plain(self, piece: Piece) -> str | None:
        return super().text_of_plain(piece) if self._reader(piece.index).is_plain else None

    def chunk_choice(self, piece: Piece) -> dict[str, Any] | None:
        """Return the choice of one chunk; tokens that have no text yet wait for theirs."""
        delta = piece.delta
        details = self._wants_logprobs or self.return_token_ids
        reader = self._reader(piece.index)
        shown = self._shown(reader.feed(delta.text, delta.finish_reason is not None))
        if not shown and delta.finish_reason is None and not (details and delta.token_ids):
            return None
        choice = self._chunk_choice(piece.index, shown)
        reason = reader.finish(delta.finish_reason)
        choice |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
        if self._wants_logprobs and delta.logprobs:
            choice["logprobs"] = chat_logprobs(self.text_of, delta.logprobs)
        if self.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _shown(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a message with thoughts under both of vLLM's names, or without."""
        if _THOUGHTS not in parts:
            return parts
        if self._wants_thoughts:
            return {**parts, "reasoning": parts[_THOUGHTS]}
        return {name: part for name, part in parts.items() if name != _THOUGHTS}

    def _reader(self, index: int) -> MessageReader:
        """Return the reader of a choice."""
        if index not in self._readers:
            self._readers[index] = self._make_reader()
        return self._readers[index]

    def _chunk_choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
