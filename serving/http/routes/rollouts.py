"""Rollouts of an adapter's versions: shares, the way back, state and history."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from lora_jax.adapters.registry import AdapterNotFound, AdapterRejected, RegistryBusy
from lora_jax.adapters.versions import NAME, joined
from serving.adapters.rollout import NoWayBack, Rollout
from serving.adapters.rollout_guard import Outcomes
from serving.adapters.rollouts import NoRollout
from serving.http.access.auth import caller_of
from serving.http.errors import ApiError, from_exception, scrub, unknown_model
from serving.http.requests.body import read_body, takes
from serving.http.requests.protocol import RolloutBody
from serving.http.routes.adapter_store import admin_server, audited, durability
from serving.http.server import Server, server_of

logger = logging.getLogger(__name__)
router = APIRouter()
_PATH = "/v1/adapters/{name}/rollout"


@router.put(_PATH, openapi_extra=takes(RolloutBody))
async def set_rollout(request: Request, name: str) -> dict[str, Any]:
    """Give versions of an adapter their shares in percent; returns the state with its history."""
    server = admin_server(request)
    body = await read_body(request, RolloutBody)
    _check_body(body)
    rollouts, request_id = server.engine.rollouts, request.scope["state"]["request_id"]
    guard = body.guard if "guard" in body.model_fields_set else "keep"

    def change() -> Rollout:
        return rollouts.set(name, body.versions, guard, request_id)

    async with audited(request, "rollout", name):
        await _changed(server, name, change)
    return _answer(server, name)


@router.post("/v1/adapters/{name}/rollback")
async def roll_back(request: Request, name: str) -> dict[str, Any]:
    """Take the newest version's users back to older ones; returns the state with its history.

    A second call with the same X-Request-Id changes nothing more.
    """
    server = admin_server(request)
    rollouts, request_id = server.engine.rollouts, request.scope["state"]["request_id"]
    async with audited(request, "rollback", name):
        await _changed(server, name, lambda: rollouts.roll_back(name, request_id))
    return _answer(server, name)


@router.get(_PATH)
async def show_rollout(request: Request, name: str) -> dict[str, Any]:
    """Return shares, guard, history and what this process has seen of each version."""
    server = server_of(request)
    if not NAME.fullmatch(name) or not caller_of(request).may_use(name):
        raise unknown_model(name)
    return _answer(server, name)


@router.delete(_PATH)
async def end_rollout(request: Request, name: str) -> dict[str, Any]:
    """Forget a rollout: the name is that of a plain adapter again."""
    server = admin_server(request)
    async with audited(request, "rollout end", name):
        await _changed(server, name, lambda: server.engine.rollouts.end(name))
    return {"name": name, "versions": {}, "message": f"The rollout of '{name}' has ended."}


def _check_body(body: RolloutBody) -> None:
    """Refuse misspelled fields: a guard that is not there guards nothing."""
    unknown = next(iter(body.model_extra or ()), None)
    if unknown is not None:
        raise ApiError(400, f"A rollout has versions and guard, not {unknown[:64]!r}.")


async def _changed(server: Server, name: str, change: Callable[[], Any]) -> None:
    """Make a change, one at a time; its errors become answers and change nothing."""
    try:
        async with server.changing:
            await asyncio.to_thread(change)
    except NoRollout as error:
        raise ApiError(404, str(error)) from None
    except NoWayBack as error:
        raise ApiError(409, f"Adapter {name!r}: {error}") from None
    except AdapterNotFound as error:
        raise ApiError(400, scrub(str(error)), param="versions") from None
    except RegistryBusy as error:
        raise from_exception(error) from None
    except AdapterRejected as error:
        raise ApiError(400, scrub(str(error)), param="versions") from None
    except ValueError as error:
        raise ApiError(400, scrub(f"Adapter {name[:64]!r}: {error}")) from None
    except OSError as error:
        logger.error("The rollout of %s cannot be written: %s", name, error)
        why = f"This change cannot be kept, so nothing has changed: {error.strerror}."
        raise ApiError(503, why) from None


def _answer(server: Server, name: str) -> dict[str, Any]:
    rollouts = server.engine.rollouts
    try:
        state, seen = rollouts.state(name), rollouts.seen(name)
    except NoRollout as error:
        listed = ", ".join(rollouts.versions_of(name)) or "none"
        raise ApiError(404, f"{error} Versions that are loaded: {listed}.") from None
    loaded = {entry.name: entry.digest for entry in server.engine.registry.known()}
    digests = {v: loaded.get(joined(name, v)) for v in state.now.buckets}  # None: not loaded
    answer = {"name": name, **state.as_json(), "digests": digests}
    answer["seen"] = {version: _seen(outcomes) for version, outcomes in seen.items()}
    note = durability(server).strip()
    return answer | ({"note": note} if note else {})


def _seen(outcomes: Outcomes) -> dict[str, Any]:
    ttft = outcomes.ttft_sum_s / outcomes.num_ttft if outcomes.num_ttft else None
    mean = outcomes.logprob_sum / outcomes.num_logprobs if outcomes.num_logprobs else None
    counts = {name: getattr(outcomes, name) for name in ("requests", "errors", "at_length")}
    return {**counts, "ttft_s": ttft, "mean_logprob": mean}
