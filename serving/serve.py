"""One engine behind HTTP on a socket, from options to the end of the process."""

import dataclasses
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from starlette.types import ASGIApp

from serving import logs
from serving.http.local_names import LocalNames
from serving.http.uvicorn_server import AnnouncingServer, bind, uvicorn_config
from serving.options import Options

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The server cannot start; the message says why and names the culprit."""


def serve(
    options: Options,
    sock: socket.socket,
    access: Any = None,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Load everything, serve on the bound socket until SIGTERM or SIGINT, close.

    With `access` (a ServerAccess) the experts' adapters are on a LoRA Server. `announce` is called
    once requests are answered. Raises StartError.
    """
    with ExitStack() as stack:
        engine = stack.enter_context(_engine(options, access))
        server = _server(options, engine, sock, announce, stack)
        stack.enter_context(logs.PeriodicStats(engine))
        run_server(server, sock)


def run_server(server: AnnouncingServer, sock: socket.socket) -> None:
    """Answer on the socket until SIGTERM or SIGINT; what was opened is still to be closed."""
    # uvicorn raises the signal again when it has shut down.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[sock])
    except KeyboardInterrupt:
        logger.info("Interrupted.")


def _engine(options: Options, access: Any):
    """Return the engine, which says on its way what it loads and compiles."""
    from serving import Engine  # here, so that --help need not wait for jax

    logger.info("%s", logs.version_line())
    values = dataclasses.asdict(options.engine)
    plain = {module.name: module.path for module in options.adapters if not module.pinned}
    try:
        more = {} if access is None else {"lora_server": access}
        engine = Engine(values.pop("model"), plain, **more, **values)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise StartError(f"Cannot serve {options.engine.model}: {error}") from error
    try:
        for module in options.adapters:
            if module.pinned:
                engine.load_adapter(module.name, module.path, pinned=True)
    except (ValueError, KeyError, OSError) as error:
        engine.close()
        raise StartError(f"Cannot serve {options.engine.model}: {error}") from error
    return engine


def _server(
    options: Options,
    engine: Any,
    sock: socket.socket,
    announce: Callable[[], None],
    stack: ExitStack,
) -> AnnouncingServer:
    """Return the server that will answer on the socket, with its start-up lines logged.

    What runs beside it ends with the stack.
    """
    from serving.http.app import create_app
    from serving.http.model_names import folder_adapters

    app = create_app(engine, dataclasses.replace(options.http, access_log=options.access_log))
    _start_aside(options, engine, app.state.server, stack)
    url, in_folder = url_of(options, sock), folder_adapters(options.engine.lora_dir)
    logs.log_all(logs.adapter_table(engine.registry.entries()))
    logs.log_all(logs.folder_lines(in_folder))
    logs.log_all(logs.route_lines(app))
    logger.info("Starting vLLM-compatible server on %s", url)
    adapters = [*(entry.name for entry in engine.registry.entries()), *sorted(in_folder)]
    base = app.state.server.names.base
    lines = logs.ready_lines(url, base, options.http.has_api_keys, adapters)
    config = uvicorn_config(guarded(app, options, sock), access_log=False, **options.uvicorn)

    def ready() -> None:
        logs.log_all(lines)
        announce()

    return AnnouncingServer(config, ready)


def _start_aside(options: Options, engine: Any, server: Any, stack: ExitStack) -> None:
    """Start what watches the keys file and what answers at the metrics' own port."""
    from serving.http.key_watch import KeyWatch
    from serving.http.metrics_app import serve_metrics

    try:
        server.audit.check()
    except OSError as error:
        raise StartError(f"Cannot write --audit-log: {error.strerror}.") from None
    if options.http.keys_file is not None:
        stack.enter_context(KeyWatch(options.http.keys_file, server.keys, server.audit))
    if options.metrics_port is None:
        return
    try:
        sock = stack.enter_context(bind(options.metrics_host, options.metrics_port))
    except OSError as error:
        where = f"{options.metrics_host}:{options.metrics_port}"
        raise StartError(f"Cannot listen on {where}: {error.strerror}.") from None
    registries = (engine.metrics.registry, server.metrics.registry)
    stack.enter_context(serve_metrics(sock, registries))
    logger.info("Metrics without a key at http://%s:%d/metrics.", *sock.getsockname()[:2])


def guarded(app: ASGIApp, options: Options, sock: socket.socket) -> ASGIApp:
    """Return the application, which answers to local names only where nothing else protects it."""
    is_open = options.insecure or options.http.has_api_keys or sock.family == socket.AF_UNIX
    return app if is_open else LocalNames(app)


def url_of(options: Options, sock: socket.socket) -> str:
    """Return the URL of a bound socket, as a client on this machine would spell it."""
    address = sock.getsockname()
    if isinstance(address, str):
        return f"unix://{address}"
    scheme = "https" if "ssl_certfile" in options.uvicorn else "http"
    shown = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"{scheme}://{shown}:{address[1]}"
