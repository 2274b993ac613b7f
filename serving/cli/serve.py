"""One engine behind HTTP on a socket, from options to the end of the process."""

import contextlib
import dataclasses
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from serving.adapters import rollouts
from serving.adapters.given_files import digests_of, refuse_changed
from serving.adapters.journal import FILE, Journal, replay
from serving.api.config import EngineConfig
from serving.api.examples import Examples, read_examples
from serving.cli.options import Options
from serving.engine.loop.pacing import SWITCH_S
from serving.engine.metrics import logs
from serving.http.access.audit import AuditLog
from serving.http.access.front_only import FrontOnly
from serving.http.access.local_names import LocalNames
from serving.http.requests.bounds import Bounds
from serving.http.wire.connections import ConnectionLimits, fitting
from serving.http.wire.drain import Drain
from serving.http.wire.edge import at_the_edge
from serving.http.wire.uvicorn_server import AnnouncingServer, bind, uvicorn_config
from serving.runtime.garbage import rare_collections
from serving.text.tokenizer_files import TokenizerFiles

logger = logging.getLogger(__name__)


_PROBES = 64  # connections to an instance besides the router's for its clients


@dataclasses.dataclass(frozen=True)
class Started:
    """Message of a ready server to the process that started it."""

    replay: Callable[[], dict[str, str]]  # repeats the journal: reasons of what failed, by name
    body_bytes: int  # largest body
    # Of the adapters given at the start, as they were read.
    digests: dict[str, str] = dataclasses.field(default_factory=dict)


class StartError(Exception):
    """The server cannot start; the message says why and names the culprit."""


def serve(
    options: Options,
    sock: socket.socket,
    access: Any = None,
    gang: Any = None,
    announce: Callable[[Started], None] = lambda started: None,
) -> None:
    """Load everything, serve on the bound socket until SIGTERM or SIGINT, close.

    With `access` (a ServerAccess) the experts' adapters are on a LoRA Server, with `gang` (a Gang)
    the model is over several hosts. `announce` is called
    once requests are answered, with what a router needs to know. Raises StartError.
    """
    sys.setswitchinterval(SWITCH_S)
    with ExitStack() as stack:
        journal = journal_of(options)
        if options.cluster.is_single:
            tell_unused_state(options)
            if journal is not None:
                stack.enter_context(only_server(journal))
        metrics = _open_aside(options, stack)
        engine = stack.enter_context(_engine(options, access, gang))

        def repeat() -> dict[str, str]:
            if journal is None:
                return {}
            return replay(journal.read(), engine.registry, journal.attempts)

        digests = _given_digests(options, engine.registry)
        repeat()
        keep_rollouts(engine, journal)
        most = options.http.max_body_bytes or Bounds.of(engine).body_bytes
        started = Started(repeat, most, digests)
        aside = stack, metrics
        server = _server(options, engine, sock, journal, lambda: announce(started), *aside)
        if options.log_stats:
            stack.enter_context(logs.PeriodicStats(engine))
        stack.enter_context(rare_collections())
        run_server(server, sock)


def _given_digests(options: Options, registry: Any) -> dict[str, str]:
    """Return the digests of the adapters given; files that must be others are refused before."""
    given = options.adapters
    wanted = {module.name: module.digest for module in given if module.digest}
    refuse_changed(registry, wanted, {module.name: module.path for module in given})
    return digests_of(registry, [module.name for module in given])


def journal_of(options: Options) -> Journal | None:
    """Return the journal of loads at run time; None where there is no folder for it."""
    if options.state_dir is None or not options.http.enable_runtime_lora:
        return None
    try:
        return Journal(options.state_dir, options.state_lasts)
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot use --state-dir: {error}") from error


def tell_unused_state(options: Options) -> None:
    """Log which files of the state folder are not used, where adapters cannot change."""
    if options.state_dir is None or options.http.enable_runtime_lora:
        return
    files = [file for file in (FILE, rollouts.FILE) if Path(options.state_dir, file).exists()]
    if files:
        logger.warning(
            "%s of --state-dir: not used. Loads at run time and rollouts need "
            "--enable-runtime-lora.",
            " and ".join(files),
        )


def keep_rollouts(engine: Any, journal: Journal | None) -> None:
    """Keep rollouts beside the journal, and take those that are there; StartError for others."""
    if journal is None:
        return
    try:
        engine.rollouts.keep_in(journal.folder)
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot use --state-dir: {error}") from error
    for name, share in engine.rollouts.lacking().items():
        logger.error(
            "The version %s has %g%% of its rollout and is not loaded: these requests fail. Load "
            "it, or roll back.",
            name,
            share,
        )


@contextlib.contextmanager
def only_server(journal: Journal) -> Iterator[None]:
    """Hold the journal's folder against other servers; StartError where one has it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(journal.owned())
        except (ValueError, OSError) as error:
            raise StartError(f"Cannot use --state-dir: {error}") from error
        yield


def run_server(server: AnnouncingServer, sock: socket.socket) -> None:
    """Answer on the socket until SIGTERM or SIGINT; what was opened is still to be closed."""
    # uvicorn raises the signal again when it has shut down.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[sock])
    except KeyboardInterrupt:
        logger.info("Interrupted.")


def _engine(options: Options, access: Any, gang: Any):
    """Return the engine, which says on its way what it loads and compiles."""
    from serving import Engine  # here, so that --help need not wait for jax

    logger.info("%s", logs.version_line())
    values = dataclasses.asdict(options.engine)
    given = {module.name: module.path for module in options.adapters}
    more: dict[str, Any] = {} if access is None else {"lora_server": access}
    more["pinned"] = [module.name for module in options.adapters if module.pinned]
    try:
        engine = Engine(values.pop("model"), given, gang=gang, **more, **values)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise StartError(f"Cannot serve {options.engine.model}: {error}") from error
    return engine


def _server(
    options: Options,
    engine: Any,
    sock: socket.socket,
    journal: Journal | None,
    announce: Callable[[], None],
    stack: ExitStack,
    metrics: socket.socket | None,
) -> AnnouncingServer:
    """Return the server that will answer on the socket, with its start-up lines logged.

    What runs beside it ends with the stack.
    """
    from serving.http.app import create_app
    from serving.http.requests.model_names import folder_adapters

    http = dataclasses.replace(options.http, access_log=options.access_log)
    examples = examples_of(options)
    app = create_app(engine, http, examples, journal)
    _start_aside(options, engine, app.state.server, stack, metrics)
    url, in_folder = url_of(options, sock), folder_adapters(options.engine.lora_dir)
    logs.log_all(logs.adapter_table(engine.registry.entries()))
    logs.log_all(logs.folder_lines(in_folder))
    logs.log_all(logs.route_lines(app))
    logger.info("Starting vLLM-compatible server on %s", url)
    adapters = [*(entry.name for entry in engine.registry.entries()), *sorted(in_folder)]
    base = app.state.server.names.base
    chats = engine.tokenizer.has_chat_template
    asked = options.http.has_api_keys, adapters, examples, chats, options.http.demo
    given = logs.ready_lines(url, base, *asked)
    if options.http.front_secret is not None:  # whose own lines say how a client asks
        given = [f"Ready: {url} serves {base} to its front alone."]

    def ready() -> None:
        logs.log_all(given)
        announce()

    return front_server(app, options, sock, ready)


def front_server(
    app: ASGIApp,
    options: Options,
    sock: socket.socket,
    ready: Callable[[], None],
    descriptors: int = 1,
    end_s: float = 0.0,
    ending: Callable[[], None] = lambda: None,
) -> AnnouncingServer:
    """Return the server of an application on the socket, within the limits of the options.

    A connection takes `descriptors`; `end_s` of the time after SIGTERM belongs to the caller.
    """
    drain = Drain(app)
    limits = ConnectionLimits(most=options.max_connections)
    if _is_inside(options, sock):  # the router has limits of its own, and waits for its clients
        limits = dataclasses.replace(limits, most=limits.most + _PROBES, stuck_s=4 * limits.stuck_s)
    limits = fitting(limits, descriptors)
    guard = guarded(drain, options, sock)
    config = uvicorn_config(guard, limits, **options.uvicorn)
    return AnnouncingServer(config, ready, drain, options.shutdown_timeout - end_s, ending)


def examples_of(options: Options) -> Examples:
    """Return the example prompts of the model and of the adapters that are named at the start."""
    examples = read_examples(options.engine.model, {m.name: m.path for m in options.adapters})
    takes_images = not options.engine.language_model_only
    return examples if takes_images else dataclasses.replace(examples, images={})


def has_template(engine: EngineConfig) -> bool:
    """Return whether messages have a template, as far as the files say without an engine."""
    try:
        template = TokenizerFiles(Path(engine.model)).chat_template()
    except (OSError, ValueError):
        template = None
    return engine.chat_template is not None or template is not None


def _open_aside(options: Options, stack: ExitStack) -> socket.socket | None:
    """Return the socket of the metrics' own port, if there is one, before a model is loaded.

    Raises StartError where the port is taken, and where the audit log cannot be written.
    """
    try:
        AuditLog(options.http.audit_log).check()
    except OSError as error:
        raise StartError(f"Cannot write --audit-log: {error.strerror}.") from None
    if options.metrics_port is None:
        return None
    try:
        return stack.enter_context(bind(options.metrics_host, options.metrics_port))
    except OSError as error:
        where = f"{options.metrics_host}:{options.metrics_port}"
        raise StartError(f"Cannot listen on {where}: {error.strerror}.") from None


def _start_aside(
    options: Options, engine: Any, server: Any, stack: ExitStack, metrics: socket.socket | None
) -> None:
    """Start what watches the keys file and what answers at the metrics' own port."""
    from serving.http.access.key_watch import KeyWatch
    from serving.http.wire.metrics_app import serve_metrics

    if options.http.keys_file is not None:
        audit = AuditLog() if options.http.is_behind_front else server.audit
        stack.enter_context(KeyWatch(options.http.keys_file, server.keys, audit))
    if metrics is None:
        return
    registries = (engine.metrics.registry, server.metrics.registry)
    stack.enter_context(serve_metrics(metrics, registries))
    logger.info("Metrics without a key at http://%s:%d/metrics.", *metrics.getsockname()[:2])


def guarded(app: ASGIApp, options: Options, sock: socket.socket) -> ASGIApp:
    """Return the application behind the edge, with local names only where it has no other guard."""
    app = at_the_edge(app, options.http)
    if options.http.front_secret is not None:
        return FrontOnly(app, options.http.front_secret)
    is_open = options.insecure or options.http.has_api_keys or sock.family == socket.AF_UNIX
    return app if is_open else LocalNames(app)


def _is_inside(options: Options, sock: socket.socket) -> bool:
    """Return whether a front of the same cluster is the only client."""
    return sock.family == socket.AF_UNIX or options.http.front_secret is not None


def url_of(options: Options, sock: socket.socket) -> str:
    """Return the URL of a bound socket, as a client on this machine would spell it."""
    address = sock.getsockname()
    if isinstance(address, str):
        return f"unix://{address}"
    scheme = "https" if "ssl_certfile" in options.uvicorn else "http"
    host = address[0] if options.http.front_secret is not None else options.host
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"{scheme}://{shown}:{address[1]}"
