"""`--functions DIR`: an agent with its functions, and the OpenAI routes in front of them.

With `--instances` each instance is such an agent, on a device of its own, behind one front.
"""

import dataclasses
import logging
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.types import ASGIApp

from serving.api.examples import read_examples
from serving.cli.options import Options
from serving.cli.serve import (
    Started,
    StartError,
    front_server,
    has_template,
    run_server,
    url_of,
)
from serving.cluster.abstract_front import BodyLimits
from serving.cluster.functions_proxy import FunctionsProxy
from serving.engine.metrics import logs
from serving.engine.metrics.quantised_line import quantised_line
from serving.functions.agent import Agent
from serving.functions.messages import http_fields
from serving.http.access.audit import AuditLog
from serving.http.access.auth import Authenticate
from serving.http.access.key_watch import KeyWatch
from serving.http.access.keys import KeyRing
from serving.http.access.observe import HttpMetrics, Observe
from serving.http.errors import CatchAll
from serving.http.requests.body import OneLength
from serving.http.requests.bounds import Bounds
from serving.http.requests.model_names import folder_adapters

logger = logging.getLogger(__name__)

_FUNCTIONS_SHARE = 0.3  # of the time after SIGTERM, for the processes to end


def serve_functions(
    options: Options,
    sock: socket.socket,
    announce: Callable[[Started], None] = lambda started: None,
) -> None:
    """Load the backbone, start the base model's function, answer until SIGTERM or SIGINT.

    `announce` is called once requests are answered. Raises StartError for what cannot be shared,
    and for a name that stands twice.
    """
    logger.info("%s", logs.version_line())
    folder = options.functions.functions
    assert folder is not None, "functions without a folder"
    names = _names(options)
    with ExitStack() as stack:
        budgets = options.http.budgets_folder  # of all instances
        if budgets is None:
            budgets = stack.enter_context(tempfile.TemporaryDirectory(prefix="lora-jax-"))
        try:
            agent = stack.enter_context(_agent(options, names, budgets))
            base = agent.function(name=names[0])  # its sizes are those of all
            max_model_len, quantization = base.about["max_model_len"], base.about["quantization"]
        except (ValueError, ConnectionError) as error:
            raise StartError(f"Cannot serve {options.engine.model}: {error}") from error
        keys, audit = KeyRing(options.http), AuditLog(options.http.audit_log)
        try:
            audit.check()
        except OSError as error:
            raise StartError(f"Cannot write --audit-log: {error.strerror}.") from None
        if options.http.keys_file is not None:
            listener = AuditLog() if options.http.is_behind_front else audit
            stack.enter_context(KeyWatch(options.http.keys_file, keys, listener))
        metrics = HttpMetrics()
        most = options.http.max_body_bytes or Bounds(max_model_len, 1).body_bytes
        limits = BodyLimits(most, options.http.body_timeout_s)
        failed_keys = metrics.failed_keys_text
        card = max_model_len, quantization
        proxy = FunctionsProxy(agent, folder, names, *card, limits, failed_keys)
        stack.callback(proxy.close)
        app = _app(proxy, options, keys, audit, metrics)
        lines = [] if quantization is None else [quantised_line(quantization)]
        lines += _ready_lines(options, sock, names[0])
        end_s = options.shutdown_timeout * _FUNCTIONS_SHARE

        def ready() -> None:
            logs.log_all(lines)
            announce(Started(dict, most))

        server = front_server(app, options, sock, ready, 2, end_s)
        run_server(server, sock)


def _names(options: Options) -> tuple[str, ...]:
    """Return the base model's names, the one in answers first. StartError where one is taken."""
    names = tuple(dict.fromkeys(options.http.served_names or (options.engine.model_name,)))
    taken = folder_adapters(options.functions.functions) & {*names}
    if taken:
        raise StartError(
            f"The name {min(taken)!r} stands twice: for the base model and for a folder below "
            "--functions. Rename the folder, or give --served-model-name."
        )
    return names


def _agent(options: Options, names: tuple[str, ...], budgets: str) -> Agent:
    """Return the agent with the sizes that the command line gave; the rest are those of FIELDS."""
    fields = {
        field.name: value
        for field in dataclasses.fields(options.engine)
        if field.name not in ("model", "dtype", "served_model_name", *_OF_FUNCTIONS)
        and (value := getattr(options.engine, field.name)) != _default(field)
    }
    http = dataclasses.replace(options.http, served_names=names)
    dtype = None if options.engine.dtype == "auto" else options.engine.dtype
    given: dict[str, Any] = {"structured_outputs": True} | fields
    return Agent(
        options.engine.model,
        dtype=dtype,
        keep_alive_s=options.functions.functions_keep_alive_s,
        memory_bytes=options.functions.functions_memory_bytes,
        ttft_slo_s=options.functions.functions_ttft_slo_s,
        isolation=options.functions.functions_isolation,
        verify_s=options.functions.functions_verify_s,
        max_tenants=options.functions.functions_max_tenants,
        http={"settings": http_fields(http), "budgets_folder": budgets},
        **given,
    )


_OF_FUNCTIONS = ("max_loras", "lora_dir", "max_esft_adapters")  # a function has one adapter


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _app(
    proxy: FunctionsProxy, options: Options, keys: KeyRing, audit: AuditLog, metrics: HttpMetrics
) -> ASGIApp:
    """Return the application: keys, lengths and sizes are checked before a body is read."""
    guarded = CatchAll(OneLength(Authenticate(proxy, keys, metrics)))
    return Observe(guarded, metrics, audit, options.access_log)


def _ready_lines(options: Options, sock: socket.socket, base: str) -> list[str]:
    folder = options.functions.functions
    names = sorted(folder_adapters(folder))
    examples = read_examples(options.engine.model, {n: f"{folder}/{n}" for n in names})
    chats, url = has_template(options.engine), url_of(options, sock)
    lines = logs.ready_lines(url, base, options.http.has_api_keys, names, examples, chats)
    return [f"Functions: {', '.join(names[:20]) or 'none'} ({len(names)}).", *lines]
