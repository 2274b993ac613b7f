"""POST /tokenize and /detokenize."""

from typing import Any

from fastapi import APIRouter, Request

from serving.http.auth import caller_of
from serving.http.body import read_body, takes
from serving.http.errors import ApiError
from serving.http.prompts import chat_prompt, check_ids, encode
from serving.http.protocol import DetokenizeBody, TokenizeBody
from serving.http.server import server_of
from serving.http.template_options import template_options

router = APIRouter()


@router.post("/tokenize", openapi_extra=takes(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """Return the tokens of a prompt, or of the prompt that messages become."""
    server = server_of(request)
    body = await read_body(request, TokenizeBody)
    await server.names.resolve(body.model, None, caller_of(request))
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    special = body.add_special_tokens
    if body.messages is not None:
        options = template_options(body, server.settings.default_template_kwargs)
        prompt = await chat_prompt(server.engine, body.messages, options, bool(special))
        ids = prompt.ids
    else:
        ids = await encode(server.engine, body.prompt or "", special is not False)
    return {
        "count": len(ids),
        "max_model_len": server.max_model_len,
        "tokens": ids,
        "token_strs": server.engine.tokenizer.token_strs(ids),
    }


@router.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, Any]:
    """Return the text of tokens."""
    server = server_of(request)
    body = await read_body(request, DetokenizeBody)
    await server.names.resolve(body.model, None, caller_of(request))
    check_ids(server.engine, body.tokens, "tokens")
    return {"prompt": server.engine.tokenizer.decode(body.tokens)}
