"""One engine behind HTTP on a socket, from options to the end of the process."""

import dataclasses
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from serving import logs
from serving.config import EngineConfig
from serving.examples import Examples, read_examples
from serving.http.edge import at_the_edge
from serving.http.local_names import LocalNames
from serving.http.uvicorn_server import AnnouncingServer, uvicorn_config
from serving.options import Options
from serving.text.tokenizer_files import TokenizerFiles

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
        server = _server(options, engine, sock, announce)
        if options.log_stats:
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
    options: Options, engine: Any, sock: socket.socket, announce: Callable[[], None]
) -> AnnouncingServer:
    """Return the server that will answer on the socket, with its start-up lines logged."""
    from serving.http.app import create_app
    from serving.http.model_names import folder_adapters

    app = create_app(engine, options.http, examples_of(options))
    url, in_folder = url_of(options, sock), folder_adapters(options.engine.lora_dir)
    logs.log_all(logs.adapter_table(engine.registry.entries()))
    logs.log_all(logs.folder_lines(in_folder))
    logs.log_all(logs.route_lines(app))
    logger.info("Starting vLLM-compatible server on %s", url)
    adapters = [*(entry.name for entry in engine.registry.entries()), *sorted(in_folder)]
    base = app.state.server.names.base
    chats = engine.tokenizer.has_chat_template
    given = logs.ready_lines(
        url, base, options.http.has_api_keys, adapters, examples_of(options), chats
    )
    config = uvicorn_config(
        guarded(app, options, sock), access_log=options.access_log, **options.uvicorn
    )

    def ready() -> None:
        logs.log_all(given)
        announce()

    return AnnouncingServer(config, ready)


def examples_of(options: Options) -> Examples:
    """Return the example prompts of the model and of the adapters that are named at the start."""
    return read_examples(options.engine.model, {m.name: m.path for m in options.adapters})


def has_template(engine: EngineConfig) -> bool:
    """Return whether messages have a template, as far as the files say without an engine."""
    try:
        found = TokenizerFiles(Path(engine.model)).chat_template()
    except (OSError, ValueError):
        found = None
    return engine.chat_template is not None or found is not None


def guarded(app: ASGIApp, options: Options, sock: socket.socket) -> ASGIApp:
    """Return the application behind the edge, with local names only where it has no other guard."""
    app = at_the_edge(app, options.http)
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
