"""The OpenAI routes in front of isolated functions: the model's name is the function's. No jax.

A function gets a connection per request, which its agent hands it, and learns the caller's limits
instead of the key. One without a process gets one; requests for others do not wait for that.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serving.cluster.abstract_front import (
    METRICS,
    METRICS_S,
    RETRY_S,
    SHORT_S,
    AbstractFront,
    BodyLimits,
)
from serving.cluster.function_metrics import FunctionMetrics
from serving.cluster.metrics import merge
from serving.cluster.peek import peek
from serving.cluster.proxy import parts_of
from serving.cluster.relay import relay, send_whole, while_there
from serving.cluster.upstream import Headers, UpstreamBroken, UpstreamSlow, send_over
from serving.functions.callers import token_of
from serving.functions.handle import DeviceFull, Function, FunctionRefused
from serving.functions.running import Running
from serving.functions.tenants import Tenant
from serving.http.access.keys import Caller
from serving.http.errors import ApiError, scrub, unknown_model
from serving.http.requests.model_names import folder_adapters, is_adapter_folder
from serving.http.routes.models import plain_card

logger = logging.getLogger(__name__)

ROUTES = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/classify",
        "/tokenize",
        "/detokenize",
    }
)
SHARED = "shared"  # label `engine` of metrics: the engine of functions that share one
_STARTING = 64  # functions that get a process at a time
_WAITING = 1024  # requests of one function without a process
_TRIES = 3  # connections to a function that loses its process each time
_END_S = 30.0  # from a broken answer to the end of its process, on a busy machine
_BUSY = {"Retry-After": RETRY_S}
_PROBE_S = 5.0  # between two looks at a device on which nothing starts


class AbstractFunctions(Protocol):
    """Functions by name, as an agent has them."""

    @property
    def functions(self) -> Mapping[str, Function]: ...

    def function(
        self, adapter: str | None = None, *, name: str | None = None, lazy: bool = False
    ) -> Function: ...


class FunctionsProxy(AbstractFront):
    """The front of the functions of one folder; for one event loop."""

    def __init__(
        self,
        agent: AbstractFunctions,
        folder: str,
        base_names: Iterable[str],
        max_model_len: int,
        quantization: Mapping[str, Any] | None = None,
        limits: BodyLimits | None = None,
        own_metrics: Any = str,
    ):
        """`base_names` are those of the base model, a function without an adapter; the first is
        its function's name. The name of a folder in `folder` is that adapter's function.
        `quantization` is what the base model's card says of quantised weights.
        """
        super().__init__(limits)
        self._agent, self._folder = agent, os.path.realpath(folder)
        self._base_names = tuple(base_names)
        self._max_model_len, self._created = max_model_len, int(time.time())
        self._quantization = quantization
        self._own_metrics, self._metrics = own_metrics, FunctionMetrics()
        self._threads = ThreadPoolExecutor(_STARTING, thread_name_prefix="start")
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, int] = {}
        self._is_lost = False  # nothing starts on this device
        self._probing: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Start no more functions."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _health(self, path: str) -> Response:
        """Return the functions' states; 503 where the device starts none any more, not even the
        base model's, so that a front before this one asks another instance.
        """
        states = {n: f.state for n, f in self._agent.functions.items()}
        down = self._is_lost and path != "/live"
        status = {"status": "lost" if self._is_lost else "ok", "functions": states}
        return JSONResponse(status, 503 if down else 200, _BUSY if down else {})

    async def _answer_here(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> bool:
        path, method = scope["path"], scope["method"]
        caller = scope.get("state", {}).get("caller") or Caller()
        if method == "POST" and path in ROUTES:
            return False
        if method == "GET" and path in METRICS:
            text = await self._metrics_text()
            headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
            await send_whole(send_, 200, headers, text.encode())
            return True
        if method in ("GET", "HEAD") and path == "/v1/models":
            cards = await asyncio.to_thread(self._cards, caller)
            answer = {"object": "list", "data": cards}
        elif method in ("GET", "HEAD") and path.startswith("/v1/models/"):
            answer = self._card_of(path.removeprefix("/v1/models/"), caller)
        else:
            routes = ", ".join(sorted(ROUTES))
            raise ApiError(
                404,
                f"There is no {method} {path[:200]} in front of functions. They answer POST "
                f"{routes}; the front answers /v1/models, /metrics and probes. Adapters are the "
                "folders below --functions.",
            )
        await JSONResponse(answer)(scope, receive, send_)
        return True

    def _cards(self, caller: Caller) -> list[dict[str, Any]]:
        """Return a card per name of the base model and per function that the caller may use."""
        names = folder_adapters(self._folder) - {*self._base_names}
        shown = sorted(name for name in names if caller.may_use(name))
        cards = [self._card(name, None) for name in self._base_names]
        return cards + [self._card(name, self._base_names[0]) for name in shown]

    def _card(self, name: str, parent: str | None) -> dict[str, Any]:
        """Return a model's card, with what an engine's says of a base (routes.models.card)."""
        said = {} if parent or self._quantization is None else {"quantization": self._quantization}
        return plain_card(name, parent, self._created, self._max_model_len) | said

    def _card_of(self, name: str, caller: Caller) -> dict[str, Any]:
        if name in self._base_names:
            return self._card(name, None)
        if not (caller.may_use(name) and self._is_function(name)):
            raise unknown_model(name)
        return self._card(name, self._base_names[0])

    async def _metrics_text(self) -> str:
        """Return the metrics of each process with its function's name, and the front's own."""
        functions = one_per_process(self._agent.functions)
        loop = asyncio.get_running_loop()
        queries = [
            loop.run_in_executor(None, functools.partial(f.metrics_text, METRICS_S))
            for f in functions.values()
        ]
        texts = dict(zip(functions, await asyncio.gather(*queries), strict=True))
        texts["front"] = self._own_metrics()
        front_text = self._metrics.text(self._agent.functions)
        return front_text + await asyncio.to_thread(merge, texts)

    async def _to_one(self, scope: Scope, body: bytes, receive: Receive, send_: Send) -> None:
        """Let the function answer that the body names.

        One whose process ends with the request may have died of it: the new one is asked, once.
        """
        path = scope["path"]
        self._suspects.check(path, body)
        function = self._function_of(scope, body)
        start = time.perf_counter()
        function.called()
        for _ in range(_TRIES):
            connection = await self._connection(function, receive)
            process = function.running
            life = process and weakref.ref(process)  # a process id may be used again
            try:
                asking = send_over(connection, *_rewritten(scope), body, *_limit(scope))
                upstream = await while_there(asking, receive)
                self._metrics.head(function.name, time.perf_counter() - start)
                await relay(upstream, receive, send_)
            except UpstreamBroken as error:
                logger.warning("Function %r has ended during a request: %s", function.name, error)
                self._suspects.died(path, body, life)
                await while_there(_ended(process), receive)
            except ConnectionAbortedError:  # a part of the answer is out
                with contextlib.suppress(ApiError):
                    self._suspects.died(path, body, life)
                raise
            except UpstreamSlow as error:
                raise ApiError(503, str(error), headers=_BUSY) from None
            else:
                function.answered()
                self._suspects.answered(path, body)
                self._metrics.answered(function.name, upstream.status)
                return
        raise ApiError(
            503,
            f"Function `{function.name}` ended at every attempt; the server's log says why.",
            headers=_BUSY,
        )

    def _function_of(self, scope: Scope, body: bytes) -> Function:
        """Return the function that a body names. Raises ApiError 404."""
        caller = scope.get("state", {}).get("caller") or Caller()
        model = peek(body).model or self._base_names[0]
        base, colon, adapter = model.partition(":")
        name = adapter if colon and base in self._base_names else model
        is_base = name in self._base_names
        scope.setdefault("state", {})["adapter"] = None if is_base else name  # for the access log
        if is_base:
            return self._agent.function(name=self._base_names[0], lazy=True)
        if not caller.may_use(name):
            raise unknown_model(model)
        if not self._is_function(name):
            self._let_go(name)
            raise unknown_model(model)
        return self._agent.function(os.path.join(self._folder, name), name=name, lazy=True)

    def _let_go(self, name: str) -> None:
        """End the process of a function whose folder has gone, unless calls are under way."""
        function = self._agent.functions.get(name)
        if function is not None and function.offload():
            function.close()

    def _is_function(self, name: str) -> bool:
        return is_adapter_folder(self._folder, name)

    async def _connection(self, function: Function, receive: Receive):
        """Return a connection to the function's process, which is started where there is none."""
        while (connection := function.connect()) is None:
            if function.state == "running":
                if (connection := function.connect()) is not None:  # a new process, just now
                    return connection
                text = f"Function `{function.name}` does not take requests now."
                raise ApiError(503, text, headers=_BUSY)
            await self._started(function, receive)
        return connection

    async def _started(self, function: Function, receive: Receive) -> None:
        """Return when the function has a process. Raises ApiError: it gets none, or too many wait.

        All that wait for it share one start; nobody's end stops it.
        """
        name = function.name
        waiting = self._waiting.get(name, 0)
        if waiting >= _WAITING:
            text = f"{waiting} requests wait for function `{name}` to start."
            raise ApiError(429, text, headers=_BUSY)
        if name not in self._starts:
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._start(function))
            task.add_done_callback(lambda _: self._starts.pop(name, None))
            self._starts[name] = task
        self._waiting[name] = waiting + 1
        try:
            await while_there(_waited(self._starts[name]), receive)
        except FunctionRefused as error:
            raise ApiError(400, scrub(str(error)), param="model") from None
        except ConnectionError as error:
            if not isinstance(error, DeviceFull):
                self._look_at_device()
            raise ApiError(503, scrub(str(error)), headers=_BUSY) from None
        finally:
            self._waiting[name] -= 1

    def _look_at_device(self) -> None:
        """See whether the base model's function starts: if not, it was not the adapter's fault."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        base = self._agent.function(name=self._base_names[0], lazy=True)
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, base.warm)
            except RuntimeError:  # the front ends
                return
            except DeviceFull:  # by functions that run: it is not lost
                self._is_lost = False
                return
            except ConnectionError as error:
                if not self._is_lost:
                    logger.error("No function starts on this device: %s", error)
                self._is_lost = True
            else:
                self._is_lost = False
                return
            await asyncio.sleep(_PROBE_S)

    async def _start(self, function: Function) -> None:
        start, before = time.perf_counter(), function.starts
        await asyncio.get_running_loop().run_in_executor(self._threads, function.warm)
        if function.starts > before:
            self._metrics.started(function.name, time.perf_counter() - start)


async def _ended(process: Running | Tenant | None) -> None:
    """Return when the process is known to have ended: it is not asked again; or after a while."""
    end = time.monotonic() + _END_S
    while process is not None and not process.ended and time.monotonic() < end:
        await asyncio.sleep(0.005)


async def _waited(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


def _rewritten(scope: Scope) -> tuple[str, bytes, Headers]:
    """Return method, target and headers with the caller in place of the key."""
    method, target, headers = parts_of(scope)
    caller = scope.get("state", {}).get("caller") or Caller()
    kept = [(name, value) for name, value in headers if name.lower() != b"authorization"]
    return method, target, [*kept, (b"authorization", b"Bearer " + token_of(caller).encode())]


def _limit(scope: Scope) -> tuple[float, ...]:
    return (SHORT_S,) if scope["path"] in ("/tokenize", "/detokenize") else ()


def one_per_process(functions: Mapping[str, Function]) -> dict[str, Function]:
    """Return a function of each process that answers: of the engine that all share, as "shared"."""
    by_process: dict[str, Function] = {}
    for name, function in functions.items():
        running = function.running
        if isinstance(running, Tenant):
            by_process.setdefault(SHARED, function)
        elif running is not None:
            by_process[name] = function
    return by_process
