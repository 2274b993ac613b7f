"""POST /classify: answers of adapters' task heads, in vLLM's form."""

import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.engine.classification import HEAD_SAMPLING
from serving.http.access.auth import caller_of
from serving.http.answers.answers import AbstractAnswer, cache_salt, respond
from serving.http.answers.generation import Generation, Piece
from serving.http.interface import AbstractEngine
from serving.http.requests.adapter_view import engine_for
from serving.http.requests.body import read_body, takes
from serving.http.requests.heads import check_classify
from serving.http.requests.images import read_images
from serving.http.requests.prompts import Prompt, chat_prompt, read_prompts
from serving.http.requests.protocol import ClassifyBody
from serving.http.requests.refused_fields import check_fields
from serving.http.requests.session import target_of
from serving.http.requests.template_options import template_options
from serving.http.requests.truncation import truncation_of
from serving.http.server import Server, server_of

router = APIRouter()


@router.post("/classify", openapi_extra=takes(ClassifyBody))
async def classify(request: Request) -> Response:
    """Return label and probabilities of each input, by the adapter's task head."""
    server, caller = server_of(request), caller_of(request)
    body = await read_body(request, ClassifyBody)
    check_fields(body)
    target = await target_of(server.names, request, body, caller)
    request.state.adapter = target.adapter
    check_classify(body, target)
    salt = cache_salt(caller.salt, body.cache_salt)
    prompts = await _prompts(server, engine_for(server.engine, target), body, salt)
    generation = Generation(server.engine, server.mailbox, prompts, by_head=True)
    samplings = [HEAD_SAMPLING] * len(prompts)
    await generation.submit_all(target.adapter, samplings, salt, caller, target.entry)
    answer = ClassifyAnswer(body, generation, target.name)
    answer.served_by(target)
    return await respond(request, server, answer, None)


async def _prompts(
    server: Server, engine: AbstractEngine, body: ClassifyBody, salt: str
) -> list[Prompt]:
    """Return the prompt of each input, or of the conversation."""
    truncation = truncation_of(body, server.max_model_len)
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await read_prompts(engine, body.input, special, "input", truncation)
    options = template_options(body, server.settings.default_template_kwargs)
    images = await read_images(engine, body.messages, server.settings.media, salt)
    special = bool(body.add_special_tokens)
    prompt = chat_prompt(
        engine, body.messages, options, special, images=images, truncation=truncation
    )
    return [await prompt]


class ClassifyAnswer(AbstractAnswer):
    """A `list` of classifications; none is streamed."""

    prefix = "classify-"

    def __init__(self, body: ClassifyBody, generation: Generation, model: str):
        super().__init__(generation, model)
        self._activate = body.use_activation is not False
        self._answers: dict[int, dict[str, Any]] = {}

    def add(self, piece: Piece) -> None:
        """Take the answer to one input; `labels` are those of a head that tells several."""
        self.usage.add(piece)
        head = piece.delta.head
        if head is None:
            raise RuntimeError("A request by head ended without its answer.")
        answer = {
            "index": piece.index,
            "label": head.label,
            "probs": list(head.probs if self._activate else head.logits),
            "num_classes": len(head.probs),
        }
        labels = {} if head.labels == (head.label,) else {"labels": list(head.labels)}
        boxes = {} if head.boxes is None else {"boxes": [dataclasses.asdict(b) for b in head.boxes]}
        self._answers[piece.index] = answer | labels | boxes

    def whole(self) -> dict[str, Any]:
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        data = [self._answers[index] for index in sorted(self._answers)]
        return head | {"data": data, "usage": self.usage.as_json()}

    def first(self) -> list[dict[str, Any]]:
        return []

    def of(self, piece: Piece) -> list[dict[str, Any]]:
        del piece
        return []

    def last(self) -> list[dict[str, Any]]:
        return []
