"""POST /v1/completions."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.engine.classification import HEAD_SAMPLING
from serving.http.access.auth import caller_of
from serving.http.answers.answers import AbstractChoices, cache_salt, respond
from serving.http.answers.generation import Generation, Piece
from serving.http.answers.logprobs import CompletionLogprobs, prompt_logprobs
from serving.http.interface import AbstractTokenizer
from serving.http.requests.adapter_view import engine_for
from serving.http.requests.body import read_body, takes
from serving.http.requests.heads import by_head, with_length
from serving.http.requests.parameters import completion_sampling, fit_context
from serving.http.requests.prompts import read_prompts
from serving.http.requests.protocol import CompletionBody
from serving.http.requests.session import target_of
from serving.http.requests.structure import compiled_grammar
from serving.http.requests.trace import trace_of
from serving.http.requests.truncation import truncation_of
from serving.http.server import server_of
from serving.http.settings import HttpSettings

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(CompletionBody))
async def create_completion(request: Request) -> Response:
    """Return the completions of one or more prompts, at once or as a stream."""
    server, caller = server_of(request), caller_of(request)
    body = await read_body(request, CompletionBody)
    target = await target_of(server.names, request, body, caller)
    request.state.adapter = target.adapter
    asks_head = by_head(body, target)
    info, limit = server.engine.model_info, server.max_model_len
    truncation = truncation_of(body, limit)
    sampling = completion_sampling(with_length(body, asks_head), limit, info.sampling_defaults)
    grammar = await compiled_grammar(server.engine, body, sampling.structured_outputs)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    engine = engine_for(server.engine, target)
    prompts = await read_prompts(engine, body.prompt, special, truncation=truncation)
    samplings = [HEAD_SAMPLING] * len(prompts)
    if not asks_head:
        most = info.most_tokens
        samplings = [fit_context(sampling, body, len(p.ids), limit, most) for p in prompts]
    options = {"by_head": asks_head, "trace": trace_of(request, server.engine)}
    generation = Generation(server.engine, server.mailbox, prompts, **options)
    salt = cache_salt(caller.salt, body.cache_salt)
    await generation.submit_all(target.adapter, samplings, salt, caller, target.entry, grammar)
    answer = CompletionAnswer(body, generation, target.name, engine.tokenizer, server.settings)
    answer.served_by(target)
    answer.named(request.state.request_id, body.request_id)
    return await respond(request, server, answer, body.stream)


class CompletionAnswer(AbstractChoices):
    """`text_completion` objects; a choice's first piece brings the prompt when it is echoed."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        generation: Generation,
        model: str,
        tokenizer: AbstractTokenizer,
        settings: HttpSettings | None = None,
    ):
        super().__init__(body, generation, model, tokenizer, settings)
        self._echo = bool(body.echo)
        self._wants_logprobs = body.logprobs is not None
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self.is_plain &= not (self._wants_logprobs or self._wants_prompt_logprobs)
        self._skip_special = body.skip_special_tokens is not False
        self._tokenizer = tokenizer
        self._logprobs = {
            i: CompletionLogprobs(self.text_of) for i in range(generation.num_choices)
        }
        self._begun: set[int] = set()

    def whole_choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Return text, logprobs and finish of one choice."""
        parts = [self._choice(piece) for piece in pieces]
        choice = parts[-1] | {"text": "".join(part["text"] for part in parts)}
        if self._wants_logprobs:
            choice["logprobs"] = {
                key: [x for part in parts for x in part["logprobs"][key]]
                for key in parts[0]["logprobs"]
            }
        for key in ("prompt_logprobs", "prompt_token_ids"):
            choice |= next(({key: part[key]} for part in parts if key in part), {})
        if self.return_token_ids:
            choice["token_ids"] = [t for part in parts for t in part["token_ids"]]
        return choice

    def chunk_choice(self, piece: Piece) -> dict[str, Any] | None:
        """Return the choice of one chunk; tokens that have no text yet wait for theirs."""
        choice = self._choice(piece)
        details = self._wants_logprobs or self.return_token_ids
        silent = not choice["text"] and choice["finish_reason"] is None
        return None if silent and not (details and piece.delta.token_ids) else choice

    def _choice(self, piece: Piece) -> dict[str, Any]:
        delta, begins = piece.delta, piece.index not in self._begun
        self._begun.add(piece.index)
        echoed = begins and self._echo
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": (self._prompt_text(piece) if echoed else "") + delta.text,
            "logprobs": self._logprobs_of(piece, echoed) if self._wants_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._wants_prompt_logprobs and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.text_of, delta.prompt_logprobs)
        if self.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if begins:
                choice["prompt_token_ids"] = piece.prompt.ids
        return choice

    def _prompt_text(self, piece: Piece) -> str:
        if piece.prompt.text is not None:
            return piece.prompt.text
        return self._tokenizer.decode(piece.prompt.ids, skip_special_tokens=self._skip_special)

    def _logprobs_of(self, piece: Piece, echoed: bool) -> dict[str, list[Any]]:
        ids, logprobs = list(piece.delta.token_ids), list(piece.delta.logprobs)
        if echoed:
            ids = piece.prompt.ids + ids
            logprobs = [*(piece.delta.prompt_logprobs or ()), *logprobs]
        return self._logprobs[piece.index].render(ids, logprobs)
