"""vLLM's, SGLang's and Dynamo's routes for adapters, and the report of one adapter."""

from collections.abc import Awaitable
from typing import Any
from urllib.parse import unquote, urlparse

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter
from serving.http.access.auth import caller_of
from serving.http.errors import ApiError, scrub, unknown_model
from serving.http.requests.body import read_body, takes
from serving.http.requests.protocol import DynamoLoadBody, LoadAdapterBody, UnloadAdapterBody
from serving.http.routes.adapter_store import (
    adapter_id,
    admin_server,
    audited,
    load,
    remarks,
    unload,
)
from serving.http.server import server_of

router = APIRouter()


@router.post(
    "/v1/load_lora_adapter",
    response_class=PlainTextResponse,
    openapi_extra=takes(LoadAdapterBody),
)
async def vllm_load(request: Request) -> Response:
    """Load an adapter; vLLM's text answer."""
    server = admin_server(request)
    body = await read_body(request, LoadAdapterBody)
    name, replace = body.lora_name, bool(body.load_inplace)
    async with audited(request, "load", name):
        entry = await load(server, name, body.lora_path, replace=replace, pinned=bool(body.pinned))
    message = f"Success: LoRA adapter '{name}' added successfully."
    return PlainTextResponse(message + remarks(server, entry))


@router.post(
    "/v1/unload_lora_adapter",
    response_class=PlainTextResponse,
    openapi_extra=takes(UnloadAdapterBody),
)
async def vllm_unload(request: Request) -> Response:
    """Unload an adapter; vLLM's text answer."""
    server = admin_server(request)
    body = await read_body(request, UnloadAdapterBody)
    async with audited(request, "unload", body.lora_name):
        await unload(server, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter", openapi_extra=takes(LoadAdapterBody))
async def sglang_load(request: Request) -> Response:
    """Load an adapter; SGLang's JSON answer."""
    server = admin_server(request)
    body = await read_body(request, LoadAdapterBody)
    replace, pinned = bool(body.load_inplace), bool(body.pinned)
    work = load(server, body.lora_name, body.lora_path, replace=replace, pinned=pinned)
    return await _sglang_answer(request, "load", body.lora_name, work)


@router.post("/unload_lora_adapter", openapi_extra=takes(UnloadAdapterBody))
async def sglang_unload(request: Request) -> Response:
    """Unload an adapter; SGLang's JSON answer."""
    server = admin_server(request)
    body = await read_body(request, UnloadAdapterBody)
    work = unload(server, body.lora_name)
    return await _sglang_answer(request, "unload", body.lora_name, work)


async def _sglang_answer(
    request: Request, action: str, name: str, work: Awaitable[AdapterEntry | EvictedAdapter | None]
) -> Response:
    error, entry = None, None
    try:
        async with audited(request, action, name):
            entry = await work
    except ApiError as failed:
        error = failed.message
    adapters = server_of(request).engine.registry.known()
    loaded = {adapter.name: adapter.path for adapter in adapters}
    answer = {"success": error is None, "error_message": error or "", "loaded_adapters": loaded}
    if entry is not None and action == "load" and (text := remarks(server_of(request), entry)):
        answer["message"] = text.strip()
    return JSONResponse(answer, 200 if error is None else 400)


@router.post("/v1/loras", openapi_extra=takes(DynamoLoadBody))
async def dynamo_load(request: Request) -> dict[str, Any]:
    """Load an adapter; Dynamo's JSON answer. The file: URI's path is one below --lora-dir."""
    server = admin_server(request)
    body = await read_body(request, DynamoLoadBody)
    async with audited(request, "load", body.lora_name):
        entry = await load(server, body.lora_name, _path_of(body.source.uri))
    return _dynamo_answer(body.lora_name, "loaded", remarks(server, entry))


@router.get("/v1/loras")
async def dynamo_list(request: Request) -> dict[str, Any]:
    """Return the loaded adapters that the caller may use; Dynamo's JSON answer.

    `refused` says, where there are any, why adapters of the journal are not served.
    """
    server, caller = server_of(request), caller_of(request)
    names = [e.name for e in server.engine.registry.known() if caller.may_use(e.name)]
    loras = {name: adapter_id(name) for name in names}
    answer = {"status": "success", "loras": loras, "count": len(loras)}
    refused = dict(server.engine.registry.refused)
    refused = {name: scrub(why) for name, why in refused.items() if caller.may_use(name)}
    return answer | ({"refused": refused} if refused else {})


@router.delete("/v1/loras/{name}")
async def dynamo_unload(request: Request, name: str) -> dict[str, Any]:
    """Unload an adapter; Dynamo's JSON answer."""
    server = admin_server(request)
    async with audited(request, "unload", name):
        await unload(server, name)
    return _dynamo_answer(name, "unloaded")


def _path_of(uri: str) -> str:
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file") or parsed.netloc:
        raise ApiError(
            400, "source.uri must be file:/// and a path below --lora-dir.", param="source"
        )
    return unquote(parsed.path).lstrip("/")


def _dynamo_answer(name: str, done: str, lasts: str = "") -> dict[str, Any]:
    message = f"LoRA adapter '{name}' {done} successfully{lasts and '.' + lasts}"
    return {
        "status": "success",
        "message": message,
        "lora_name": name,
        "lora_id": adapter_id(name),
    }


@router.get("/v1/adapters/{name}")
async def report(request: Request, name: str) -> dict[str, Any]:
    """Return modules, ranks, scalings, bytes and sha256 of an adapter; it is loaded if need be."""
    server = server_of(request)
    gone = request.is_disconnected
    target = await server.names.resolve(name, None, caller_of(request), is_gone=gone)
    entry = target.entry
    if entry is None:
        raise unknown_model(name)
    details = entry.report.as_json()
    details["base_model"] = _name_only(details.get("base_model"))
    details["warnings"] = [scrub(text) for text in entry.report.warnings]
    state = {"name": entry.name, "generation": entry.generation, "pinned": entry.pinned}
    state["resident"] = entry.name in server.engine.stats().resident_adapters
    return state | details


def _name_only(base_model: str | None) -> str | None:
    """Return the base model an adapter was made for; of a path on a disk only its last part."""
    if base_model is None or base_model.count("/") + base_model.count("\\") <= 1:
        return base_model if base_model is None else base_model.lstrip("/~.\\")
    return base_model.replace("\\", "/").rstrip("/").rpartition("/")[2]
