"""POST /v1/chat/completions."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.api.request import FinishReason
from serving.engine.classification import HEAD_SAMPLING
from serving.http.access.auth import caller_of
from serving.http.answers.answers import AbstractAnswer, cache_salt, respond
from serving.http.answers.generation import Generation, Piece
from serving.http.answers.logprobs import chat_logprobs, prompt_logprobs
from serving.http.answers.message_reader import MessageReader
from serving.http.answers.tool_calls import ToolCallReader, joined
from serving.http.interface import AbstractTokenizer
from serving.http.requests.body import read_body, takes
from serving.http.requests.heads import by_head
from serving.http.requests.images import read_images
from serving.http.requests.parameters import chat_sampling, fit_context
from serving.http.requests.prompts import chat_prompt, plain_messages, text_of
from serving.http.requests.protocol import ChatBody
from serving.http.requests.session import target_of
from serving.http.requests.structure import compiled_grammar
from serving.http.requests.template_options import template_options
from serving.http.requests.tools import auto_parser, demanded_calls
from serving.http.server import server_of
from serving.http.settings import HttpSettings

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
async def create_chat_completion(request: Request) -> Response:
    """Return the assistant's next message, at once or as a stream."""
    server, caller = server_of(request), caller_of(request)
    body = await read_body(request, ChatBody)
    target = await target_of(server.names, request, body, caller)
    request.state.adapter = target.adapter
    defaults = server.engine.model_info.sampling_defaults
    # Refuse bad parameters before any work on the messages.
    asks_head = by_head(body, target)
    parser = auto_parser(body, server.settings.auto_call_parser)
    outputs = chat_sampling(body, 1, defaults).structured_outputs
    grammar = await compiled_grammar(server.engine, body, outputs)
    options = template_options(body, server.settings.default_template_kwargs)
    special = bool(body.add_special_tokens)  # templates write their own special tokens
    images = await read_images(server.engine, body.messages, server.settings.media)
    prompt = await chat_prompt(server.engine, body.messages, options, special, images=images)
    limit, length = server.max_model_len, len(prompt.ids)
    sampling = fit_context(chat_sampling(body, limit - length, defaults), body, length, limit)
    if asks_head:
        sampling = HEAD_SAMPLING
    elif parser is not None:  # the marks around calls are special tokens of some models
        sampling = dataclasses.replace(sampling, skip_special_tokens=False)
    generation = Generation(server.engine, server.mailbox, [prompt], by_head=asks_head)
    salt = cache_salt(caller.salt, body.cache_salt)
    generation.submit(target.adapter, [sampling], salt, caller, target.entry, grammar)
    last = plain_messages(server.engine, body.messages[-1:])[0]
    role = server.settings.response_role if options.add_generation_prompt else last["role"]
    echo = text_of(last) if body.echo and last["role"] == role else ""
    answer = ChatAnswer(
        body, generation, target.name, server.engine.tokenizer, server.settings, role, echo
    )
    answer.served_by(target)
    return await respond(request, server, answer, body.stream)


class ChatAnswer(AbstractAnswer):
    """`chat.completion` objects and their chunks."""

    prefix = "chatcmpl"
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
        demanded = demanded_calls(body)
        self._function = None if demanded is None else demanded.name  # "": any of them
        self._readers: dict[int, ToolCallReader] = {}  # of demanded calls
        self._messages: dict[int, MessageReader] = {}  # of other answers
        self._parser = auto_parser(body, settings.auto_call_parser)
        is_bound = generation.samplings[0].structured_outputs is not None
        has_thoughts = not (is_bound or generation.by_head)
        self._reasoning = settings.reasoning_parser if has_thoughts else None
        self._thinks = (generation.prompts[0].text or "").rstrip().endswith("<think>")
        self._parallel = body.parallel_tool_calls is not False

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
        if self._function is not None:
            reader = self._reader(index)
            reader.feed(text)
            calls = [call.as_json() for call in reader.calls]
            choice["message"] |= {"content": None, "tool_calls": calls}
        else:
            choice["message"] |= self._message(index).whole(text, self._echo)
        choice["finish_reason"] = self._finish(index, last.finish_reason)
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
        return [
            self.chunk([self._chunk_choice(i, delta)])
            for delta in deltas
            for i in range(self.generation.num_choices)
        ]

    def chunk_choice(self, piece: Piece) -> dict[str, Any] | None:
        """Return the choice of one chunk; tokens that have no text yet wait for theirs."""
        delta = piece.delta
        details = self._wants_logprobs or self.return_token_ids
        if self._function is not None:
            calls = self._reader(piece.index).feed(delta.text)
            shown: dict[str, Any] = {"tool_calls": joined(calls)} if calls else {}
        else:
            ends = delta.finish_reason is not None
            shown = self._message(piece.index).feed(delta.text, ends)
        if not shown and delta.finish_reason is None and not (details and delta.token_ids):
            return None
        choice = self._chunk_choice(piece.index, shown)
        reason = self._finish(piece.index, delta.finish_reason)
        choice |= {"finish_reason": reason, "stop_reason": delta.stop_reason}
        if self._wants_logprobs and delta.logprobs:
            choice["logprobs"] = chat_logprobs(self.text_of, delta.logprobs)
        if self.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _reader(self, index: int) -> ToolCallReader:
        """Return the reader of a choice whose text is tool calls."""
        return self._readers.setdefault(index, ToolCallReader(self._function or ""))

    def _message(self, index: int) -> MessageReader:
        """Return the reader of a choice that may have thoughts, content and calls."""
        made = self._messages.get(index)
        if made is None:
            made = MessageReader(
                self._parser, self._reasoning, thinks=self._thinks, parallel=self._parallel
            )
            self._messages[index] = made
        return made

    def _finish(self, index: int, reason: FinishReason | None) -> str | None:
        """Return why a choice ended; as vLLM has it, one demanded function just stops."""
        if reason is not FinishReason.STOP or self._function:
            return reason
        is_listed = self._function == ""
        calls = self._reader(index).calls if is_listed else self._message(index).calls
        return "tool_calls" if calls else reason

    def _chunk_choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
