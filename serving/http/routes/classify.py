"""POST /classify: answers of adapters' task heads, in vLLM's form."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.engine.classification import HEAD_SAMPLING
from serving.http.access.auth import caller_of
from serving.http.answers.answers import AbstractAnswer, cache_salt, respond
from serving.http.answers.generation import Generation, Piece
from serving.http.errors import ApiError
from serving.http.requests.body import read_body, takes
from serving.http.requests.heads import check_classify
from serving.http.requests.images import read_images
from serving.http.requests.prompts import Prompt, chat_prompt, read_prompts
from serving.http.requests.protocol import ClassifyBody, GenerationBody, unsupported
from serving.http.requests.session import target_of
from serving.http.requests.template_options import template_options
from serving.http.server import Server, server_of

router = APIRouter()


@router.post("/classify", openapi_extra=takes(ClassifyBody))
async def classify(request: Request) -> Response:
    """Return label and probabilities of each input, by the adapter's task head."""
    server, caller = server_of(request), caller_of(request)
    body = await read_body(request, ClassifyBody)
    if name := unsupported(body):
        raise ApiError(400, f"{name} is not supported.", param=name)
    target = await target_of(server.names, request, body, caller)
    request.state.adapter = target.adapter
    check_classify(body, target)
    prompts = await _prompts(server, body)
    generation = Generation(server.engine, server.mailbox, prompts, by_head=True)
    salt = cache_salt(caller.salt, body.cache_salt)
    samplings = [HEAD_SAMPLING] * len(prompts)
    await generation.submit_all(target.adapter, samplings, salt, caller, target.entry)
    answer = ClassifyAnswer(body, generation, target.name, server)
    answer.served_by(target)
    return await respond(request, server, answer, None)


async def _prompts(server: Server, body: ClassifyBody) -> list[Prompt]:
    """Return the prompt of each input, or of the conversation."""
    engine = server.engine
    if body.messages is None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await read_prompts(engine, body.input, special, field="input")
    options = template_options(body, server.settings.default_template_kwargs)
    images = await read_images(engine, body.messages, server.settings.media)
    special = bool(body.add_special_tokens)
    return [await chat_prompt(engine, body.messages, options, special, images=images)]


class ClassifyAnswer(AbstractAnswer):
    """A `list` of classifications."""

    prefix = "classify"
    whole_object = "list"
    chunk_object = ""  # never streamed

    def __init__(self, body: ClassifyBody, generation: Generation, model: str, server: Server):
        nothing = GenerationBody()  # no option of generated text
        super().__init__(nothing, generation, model, server.engine.tokenizer, server.settings)
        self._activate = body.use_activation is not False

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        data = [self.whole_choice(i, pieces) for i, pieces in self._pieces.items()]
        head = {"object": self.whole_object, **self._head}
        return head | {"data": data, "usage": self.usage.as_json()}

    def whole_choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Return the classification of one input; `labels` are those of a multi_label head."""
        head = pieces[-1].delta.head
        assert head is not None, "a request by head ends with its answer"
        answer = {
            "index": index,
            "label": head.label,
            "probs": list(head.probs if self._activate else head.logits),
            "num_classes": len(head.probs),
        }
        return answer if head.labels == (head.label,) else answer | {"labels": list(head.labels)}

    def chunk_choice(self, piece: Piece) -> dict[str, Any] | None:
        """Return nothing: no answer of a head is streamed."""
        del piece
