"""POST /tokenize and /detokenize."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.http.access.auth import caller_of
from serving.http.answers.json_pieces import json_response
from serving.http.errors import ApiError
from serving.http.interface import AbstractTokenizer
from serving.http.lanes import Lane, run_in
from serving.http.requests.adapter_view import engine_for
from serving.http.requests.body import read_body, takes
from serving.http.requests.bounds import Bounds
from serving.http.requests.images import read_images
from serving.http.requests.prompts import chat_prompt, check_ids, encode
from serving.http.requests.protocol import DetokenizeBody, TokenizeBody
from serving.http.requests.template_options import template_options
from serving.http.server import Server, server_of

router = APIRouter()
_SHORT = 1 << 14  # tokens


@router.post("/tokenize", openapi_extra=takes(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Return the tokens of a prompt, or of the prompt that messages become."""
    server = server_of(request)
    most = Bounds.of(server.engine).tokens
    body = await read_body(request, TokenizeBody)
    caller = caller_of(request)
    gone = request.is_disconnected
    target = await server.names.resolve(body.model, None, caller, is_gone=gone)
    engine = engine_for(server.engine, target)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        options = template_options(body, server.settings.default_template_kwargs)
        media = server.settings.media
        images = await read_images(server.engine, body.messages, media, caller.salt)
        prompt = await chat_prompt(engine, body.messages, options, bool(special), most, images)
        ids = prompt.ids
    else:
        ids = await encode(engine, body.prompt or "", special is not False, most)
    return await run_in(_lane(ids), _tokens_answer, server, engine.tokenizer, ids)


@router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    server = server_of(request)
    body = await read_body(request, DetokenizeBody)
    gone = request.is_disconnected
    target = await server.names.resolve(body.model, None, caller_of(request), is_gone=gone)
    tokenizer = engine_for(server.engine, target).tokenizer
    check_ids(server.engine, body.tokens, "tokens", Bounds.of(server.engine).tokens)
    return await run_in(_lane(body.tokens), _text_answer, tokenizer, body.tokens)


def _lane(ids: list[int]) -> Lane:
    """Return where text is made of so many tokens."""
    return Lane.SHORT if len(ids) <= _SHORT else Lane.LONG


def _tokens_answer(server: Server, tokenizer: AbstractTokenizer, ids: list[int]) -> Response:
    answer = {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids}
    return json_response(answer | {"token_strs": tokenizer.token_strs(ids)})


def _text_answer(tokenizer: AbstractTokenizer, ids: list[int]) -> Response:
    return json_response({"prompt": tokenizer.decode(ids)})
