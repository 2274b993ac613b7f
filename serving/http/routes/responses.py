"""POST /v1/responses: OpenAI's Responses API over chats; nothing is stored."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.api.request import FinishReason
from serving.http.answers.answers import AbstractAnswer, respond
from serving.http.answers.chat_generation import chat_generation
from serving.http.answers.generation import Generation, Piece
from serving.http.answers.logprobs import TokenText, chat_logprobs, token_text
from serving.http.answers.message_reader import MessageReader, reader_of
from serving.http.answers.response_items import Event, ResponseItems
from serving.http.answers.streaming import NamedEventStream
from serving.http.errors import ApiError
from serving.http.lanes import Lane, run_in
from serving.http.requests.body import read_body, takes
from serving.http.requests.bounds import Bounds
from serving.http.requests.protocol import ResponsesBody
from serving.http.requests.responses import LOGPROBS, chat_of, own_names
from serving.http.server import server_of

router = APIRouter()


@router.post("/v1/responses", openapi_extra=takes(ResponsesBody))
async def create_response(request: Request) -> Response:
    """Return a model's response to text, images and outputs of functions, whole or as events."""
    server = server_of(request)
    body = await read_body(request, ResponsesBody)
    chat = await run_in(Lane.SHORT, chat_of, body, Bounds.of(server.engine).context)
    with own_names():
        generation = await chat_generation(request, server, chat)
    reader = reader_of(chat, server.settings, generation.generation)()
    text_of = token_text(generation.tokenizer, server.settings.tokens_as_ids)
    answer = ResponseAnswer(body, generation.generation, generation.target.name, reader, text_of)
    answer.served_by(generation.target)
    return await respond(request, server, answer, body.stream)


class ResponseAnswer(AbstractAnswer):
    """A `response` object and its semantic events."""

    prefix = "resp_"
    stream_type = NamedEventStream

    def __init__(
        self,
        body: ResponsesBody,
        generation: Generation,
        model: str,
        reader: MessageReader,
        text_of: TokenText,
    ):
        super().__init__(generation, model)
        self._reader, self._text_of = reader, text_of
        self._items = ResponseItems()
        self._wants_logprobs = LOGPROBS in (body.include or ())
        self._num_events = 0
        self._logprobs: list[Any] = []  # of tokens whose text has not come yet
        self._is_thinking, self._num_thought = True, 0  # tokens before the first other text
        sampling = generation.samplings[0]
        given = body.model_dump(include={"instructions", "tool_choice", "tools", "metadata"})
        self._response = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given["instructions"],
            "max_output_tokens": body.max_output_tokens,
            "metadata": given["metadata"] or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"] or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def first(self) -> list[Event]:
        events = ("response.created", "response.in_progress")
        return self._numbered({"type": kind, "response": dict(self._response)} for kind in events)

    def of(self, piece: Piece) -> list[Event]:
        return self._numbered(self._take(piece))

    def last(self) -> list[Event]:
        kind = f"response.{self._response['status']}"
        return self._numbered([{"type": kind, "response": self._response}])

    def add(self, piece: Piece) -> None:
        self._take(piece)

    def whole(self) -> dict[str, Any]:
        return self._response

    def failed(self, error: ApiError) -> list[Event]:
        self._end("failed", False)
        code = "invalid_prompt" if error.status == 400 else "server_error"
        self._response["error"] = {"code": code, "message": error.message}
        return self.last()

    def _numbered(self, events: Any) -> list[Event]:
        numbered = []
        for event in events:
            numbered.append({**event, "sequence_number": self._num_events})
            self._num_events += 1
        return numbered

    def _take(self, piece: Piece) -> list[Event]:
        """Return the events of a piece, with those of the end if it is the last."""
        self.usage.add(piece)
        delta, reason = piece.delta, piece.delta.finish_reason
        if self._wants_logprobs:
            self._logprobs += chat_logprobs(self._text_of, delta.logprobs)["content"]
        shown = self._reader.feed(delta.text, reason is not None)
        self._is_thinking &= not (shown.keys() - {"reasoning_content"})
        if self._is_thinking:
            self._num_thought += len(delta.token_ids)
        logprobs = self._logprobs
        events = self._items.take(shown, logprobs)
        if shown or (self._is_thinking and self._items.output):  # not those of thoughts and marks
            self._logprobs = []
        if reason is None:
            return events
        is_complete = reason is FinishReason.STOP
        if reason is FinishReason.LENGTH:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return events + self._end("completed" if is_complete else "incomplete", is_complete)

    def _end(self, status: str, is_complete: bool) -> list[Event]:
        events = self._items.end(is_complete=is_complete) if status != "failed" else []
        usage = self.usage.as_json()
        output = self._items.output
        thought = any(item["type"] == "reasoning" for item in output) and self._num_thought
        self._response |= {
            "status": status,
            "output": output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": int(thought)},
                "total_tokens": usage["total_tokens"],
            },
        }
        return events
