"""The OpenAI routes in front of several instances: each request goes to one of them. No jax.

Keys were checked before; of a body only the model's name is looked for, and the sequences where its
key has a limit of them. What changes adapters goes to all instances.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lora_jax.adapters.versions import FULL_NAME
from serving.cluster.abstract_front import (
    METRICS,
    METRICS_S,
    RETRY_S,
    SHORT_S,
    AbstractFront,
    BodyLimits,
)
from serving.cluster.adapter_changes import AdapterChanges
from serving.cluster.addresses import Address
from serving.cluster.metrics import merge, role_lines
from serving.cluster.peek import peek
from serving.cluster.relay import relay, send_whole, while_there
from serving.cluster.router import Router
from serving.cluster.upstream import (
    HEAD_S,
    Headers,
    Upstream,
    UpstreamBroken,
    UpstreamDown,
    UpstreamSlow,
    send,
)
from serving.http.errors import ApiError

logger = logging.getLogger(__name__)

_TO_ALL = {
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"),
    ("POST", "/v1/loras"),
}
_DEFAULT_TOKENS = 16.0
_CHANGE_S = 300.0  # for an adapter that is loaded

Roles = Callable[[], Mapping[str, Sequence[bool]]]  # which are up, by kind
Answer = tuple[int, Headers, bytes]


class Proxy(AbstractFront):
    """The front over the sockets of the instances."""

    def __init__(
        self,
        paths: Sequence[Address],
        router: Router,
        base_names: Sequence[str],
        limits: BodyLimits | None = None,
        roles: Roles | None = None,
        changes: AdapterChanges | None = None,
        own_metrics: Callable[[], str] = str,
    ):
        """`paths` are the instances' addresses; the caller may change one of another host.

        `base_names` are those of the base model; every other one is an adapter's.

        `own_metrics` is a Prometheus text of the front, which has the label engine="front".
        """
        super().__init__(limits)
        self._paths, self._router = paths, router
        self._base_names = frozenset(base_names)
        self._roles = roles or self._instances_up
        self._changes = changes or AdapterChanges(None, lambda: ())
        self._own_metrics = own_metrics

    async def _answer_here(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> bool:
        path, method = scope["path"], scope["method"]
        if path in METRICS and method == "GET":
            await self._metrics(scope, send_)
        elif (method, path) in _TO_ALL or (method == "DELETE" and path.startswith("/v1/loras/")):
            await self._to_all(scope, body, send_)
        else:
            return False
        return True

    def _health(self, path: str) -> Response:
        """Return the sum of all roles; no request is sent, so it never waits."""
        roles = {kind: list(up) for kind, up in self._roles().items()}
        is_ready = any(roles["instances"])
        status = "ok" if all(map(all, roles.values())) else "degraded" if is_ready else "down"
        headers = {} if is_ready else {"Retry-After": RETRY_S}
        code = 200 if is_ready or path == "/live" else 503
        shown = {kind: ["up" if one else "down" for one in up] for kind, up in roles.items()}
        return JSONResponse({"status": status, **shown}, code, headers)

    def _instances_up(self) -> dict[str, list[bool]]:
        return {"instances": [n in self._router.up for n in range(len(self._paths))]}

    async def _to_one(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> None:
        """Pass the request on, and its answer back.

        An instance that cannot be reached has begun nothing: another one is asked. One that ends
        with the request may have died of it: a second one is asked, never a third.
        """
        path = scope["path"]
        self._suspects.check(path, body)
        adapter, load = self._model_of(body)
        scope.setdefault("state", {})["adapter"] = adapter  # for the access log
        tried: list[int] = []
        while len(tried) < len(self._paths):
            instance = self._router.choose(adapter, load, tried)
            life = self._router.life(instance)
            try:
                status = await self._exchange(instance, scope, body, receive, send_)
            except (UpstreamDown, UpstreamBroken) as error:
                logger.warning("Instance %d is down: %s", instance, error)
                self._router.set_up(instance, False)
                tried.append(instance)
                if isinstance(error, UpstreamBroken):
                    self._suspects.died(path, body, life)
            except ConnectionAbortedError:  # a part of the answer is out
                self._router.set_up(instance, False)
                with contextlib.suppress(ApiError):
                    self._suspects.died(path, body, life)
                raise
            except UpstreamSlow as error:
                raise ApiError(503, str(error), headers={"Retry-After": RETRY_S}) from None
            else:
                self._suspects.answered(path, body)
                self._note(adapter, instance, load, status)
                return
            finally:
                self._router.done(instance)
        raise _nobody()

    async def _exchange(
        self, instance: int, scope: Scope, body: bytes, receive: Receive, send_: Send
    ) -> int:
        """Let one instance answer; return the status."""
        limit_s = SHORT_S if scope["method"] in ("GET", "HEAD") else HEAD_S
        asking = self._send(instance, scope, body, limit_s)
        upstream = await while_there(asking, receive)
        await relay(upstream, receive, send_)
        return upstream.status

    async def _send(self, instance: int, scope: Scope, body: bytes, limit_s: float) -> Upstream:
        return await send(self._paths[instance], *parts_of(scope), body, limit_s)

    def _note(self, adapter: str | None, instance: int, load: float, status: int) -> None:
        if adapter is not None and status < 300:
            self._router.answered(adapter, instance, load)
        elif adapter is not None and status == 404:
            self._router.forget(adapter)

    async def _to_all(self, scope: Scope, body: bytes, send_: Send) -> None:
        """Let every instance do the same; then they agree, and the answer is true of all.

        It is a success when one has succeeded and the others could follow its journal: an instance
        that has the adapter already refuses it, and one that ended repeats it when it is back.
        """
        while not self._changes.lock.acquire(blocking=False):
            await asyncio.sleep(0.01)
        try:
            before = await asyncio.to_thread(self._changes.read)
            answers = await self._everywhere(scope, body, _CHANGE_S, range(len(self._paths)))
            agreed = await asyncio.to_thread(self._changes.agree, before)
        finally:
            self._changes.lock.release()
        if not answers:
            raise _nobody()
        good = [answer for answer in answers.values() if answer[0] < 300]
        bad = [answer for answer in answers.values() if answer[0] >= 300]
        if not agreed and not bad:
            raise ApiError(
                503, "An instance could not apply the change; it was undone on all instances."
            )
        follow = agreed and self._changes.are_recorded
        await send_whole(send_, *(good + bad if follow else bad + good)[0])

    async def _metrics(self, scope: Scope, send_: Send) -> None:
        answers = await self._everywhere(scope, b"", METRICS_S, self._router.up)
        good = {
            str(n): content.decode() for n, (code, _, content) in answers.items() if code == 200
        }
        bad = next((answer for answer in answers.values() if answer[0] != 200), None)
        if bad is not None:
            await send_whole(send_, *bad)
            return
        good["front"] = self._own_metrics()
        text = role_lines(self._roles()) + await asyncio.to_thread(merge, good)
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send_whole(send_, 200, headers, text.encode())

    async def _everywhere(
        self, scope: Scope, body: bytes, limit_s: float, instances: Sequence[int]
    ) -> dict[int, Answer]:
        """Return the answers of those of the instances that are there, by number."""

        async def one(instance: int) -> Answer | None:
            try:
                async with asyncio.timeout(limit_s):
                    upstream = await self._send(instance, scope, body, limit_s)
                    try:
                        content = await upstream.whole()
                    finally:
                        await upstream.close()
            except (ConnectionError, TimeoutError) as error:
                logger.warning("Instance %d does not answer: %s", instance, error)
                return None
            return upstream.status, upstream.headers, content

        answers = await asyncio.gather(*map(one, instances))
        return {n: a for n, a in zip(instances, answers, strict=True) if a is not None}

    def _model_of(self, body: bytes) -> tuple[str | None, float]:
        """Return the adapter that a body names, None for the base model, and its load in tokens."""
        fields = peek(body)
        model = fields.model or ""
        base, colon, adapter = model.partition(":")
        if colon and base in self._base_names:
            model = adapter
        if model in self._base_names or not FULL_NAME.fullmatch(model):
            return None, 0.0
        return model, fields.max_tokens or _DEFAULT_TOKENS


def _nobody() -> ApiError:
    return ApiError(503, "No instance is there now.", headers={"Retry-After": RETRY_S})


def parts_of(scope: Scope) -> tuple[str, bytes, Headers]:
    """Return method, target with the query, and headers of an ASGI request, to send it on."""
    query = scope.get("query_string", b"")
    target = scope.get("raw_path") or scope["path"].encode()
    return scope["method"], target + (b"?" + query if query else b""), scope["headers"]
