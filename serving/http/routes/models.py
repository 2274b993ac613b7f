"""GET /v1/models and GET /v1/models/{id}: the base model and the adapters the caller may use."""

from typing import Any

from fastapi import APIRouter, Request

from lora_jax.adapters.task_head import TaskHead
from serving.http.access.auth import caller_of
from serving.http.errors import unknown_model
from serving.http.server import Server, server_of

router = APIRouter()


@router.get("/v1/models")
def list_models(request: Request) -> dict[str, Any]:
    """Return a card per name of the base model and per adapter."""
    # Not a coroutine: it looks through a folder that may hold thousands, so it runs in a thread.
    server = server_of(request)
    cards = [card(server, name, None) for name in server.names.listed]
    adapters = server.names.visible_adapters(caller_of(request))
    heads = server.names.heads()
    cards += [card(server, name, server.names.base, heads.get(name)) for name in adapters]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{model:path}")
async def show_model(request: Request, model: str) -> dict[str, Any]:
    """Return the card of one model; the id may hold slashes."""
    server = server_of(request)
    if server.names.is_base(model):
        return card(server, model, None)
    if not server.names.sees_adapter(model, caller_of(request)):
        raise unknown_model(model)
    return card(server, model, server.names.base, server.names.heads().get(model))


def card(
    server: Server, name: str, parent: str | None, head: TaskHead | None = None
) -> dict[str, Any]:
    """Return a model's card.

    The base's says which of its weights are quantised, if any are; an adapter's has kind and labels
    of its task head, if it has one and its folder has been read.
    """
    quantization = server.engine.model_info.quantization if parent is None else None
    return {
        **plain_card(name, parent, server.created, server.max_model_len),
        **({} if quantization is None else {"quantization": quantization}),
        **({} if head is None else {"head": {"kind": head.kind, "labels": head.labels}}),
    }


def plain_card(name: str, parent: str | None, created: int, max_model_len: int) -> dict[str, Any]:
    """Return vLLM's model card; `root` is a name, never a path."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "lora-jax",
        "root": name,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    allowed = ("allow_sampling", "allow_logprobs", "allow_view")
    denied = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "organization": "*",
        "group": None,
        **dict.fromkeys(allowed, True),
        **dict.fromkeys(denied, False),
    }
