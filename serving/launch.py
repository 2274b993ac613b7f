"""`python -m serving.launch MODEL`: flags, environment and config file become a running server.

vLLM's flag names; SGLang's spellings of the adapter flags work too. A flag wins over its twin in
the environment (SERVING_MAX_LORAS for --max-loras), which wins over the --config file. This is
the only place in `serving` that reads the environment.
"""

import dataclasses
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from serving import logs
from serving.config import EngineConfig
from serving.flags import LoraModule, ParserWithSource, build_parser, lora_module, read_layers
from serving.http.keys import read_keys_file
from serving.http.settings import HttpSettings
from serving.http.uvicorn_server import AnnouncingServer, bind, uvicorn_config

logger = logging.getLogger("serving.launch")  # also when it runs as __main__


class StartError(Exception):
    """The server cannot start; the message says why and names the culprit."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Everything the command line says."""

    engine: EngineConfig
    http: HttpSettings
    adapters: tuple[LoraModule, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    log_level: str = "info"
    access_log: bool = True
    plan: str | None = None  # a workload file: print the plan for it instead of serving
    uvicorn: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [module.name for module in self.adapters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"--lora-modules has the name {twice!r} twice.")
        if not (self.insecure or self.http.has_api_keys or is_loopback(self.host)):
            raise ValueError(
                f"Without --api-key or --keys-file everybody who can reach {self.host} could use "
                "this server. Give a key, or say --insecure if that is what you want."
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options; a mistake ends the process with status 2 and a message that names it."""
    parser = build_parser()
    given = read_layers(parser, argv, environ)
    if environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"):
        given.setdefault("enable_runtime_lora", True)
    try:
        return _options(parser, given)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _options(parser: ParserWithSource, given: dict[str, Any]) -> Options:
    model = given.get("model_tag") or given.get("model")
    if not model:
        parser.error("which model? Give its folder: python -m serving.launch FOLDER")
    served = tuple(given.get("served_model_name", ()))
    engine_fields = {f.name for f in dataclasses.fields(EngineConfig)} - {"model"}
    values = {name: given[name] for name in engine_fields & given.keys()}
    if served:
        values["served_model_name"] = served[0]
    if "max_loras_per_batch" in given:  # SGLang counts the base model as one
        values.setdefault("max_loras", max(1, given["max_loras_per_batch"] - 1))
    settings = HttpSettings(
        served_names=served,
        api_keys=tuple(given.get("api_key", ())),
        admin_keys=tuple(given.get("admin_api_key", ())),
        metrics_keys=tuple(given.get("metrics_key", ())),
        tenants=read_keys_file(given["keys_file"]) if "keys_file" in given else (),
        enable_runtime_lora=given.get("enable_runtime_lora", False),
        demo=given.get("demo", False),
    )
    plain = {
        name: given[name]
        for name in ("host", "port", "insecure", "log_level", "plan")
        if name in given
    }
    uvicorn_names = ("ssl_keyfile", "ssl_certfile", "h11_max_incomplete_event_size")
    return Options(
        engine=EngineConfig(model=model, **values),
        http=settings,
        adapters=tuple(lora_module(text) for text in given.get("lora_modules", ())),
        access_log=not given.get("disable_uvicorn_access_log", False),
        uvicorn={name: given[name] for name in uvicorn_names if name in given},
        **plain,
    )


def run(options: Options) -> None:
    """Load everything, serve until SIGTERM or SIGINT, close. Raises StartError."""
    with ExitStack() as stack:
        sock = _listen(options)
        stack.callback(sock.close)
        engine = stack.enter_context(_engine(options))
        server = _server(options, engine, sock)
        stack.enter_context(logs.PeriodicStats(engine))
        # uvicorn raises the signal again when it has shut down; the engine is still to be closed.
        signal.signal(signal.SIGTERM, lambda *_: None)
        try:
            server.run(sockets=[sock])
        except KeyboardInterrupt:
            logger.info("Interrupted.")


def _show_plan(model: str, workload: str) -> None:
    """Print how large a LoRA Server the workload file needs."""
    from serving.plan import plan_of_files

    try:
        text = plan_of_files(model, workload)
    except (ValueError, OSError) as error:
        raise StartError(f"No plan: {error}") from error
    print(text)


def _listen(options: Options) -> socket.socket:
    """Take the port before the model is loaded: a taken one is found out at once."""
    try:
        return bind(options.host, options.port)
    except OSError as error:
        raise StartError(f"Cannot listen on {options.host}:{options.port}: {error}") from None


def _engine(options: Options):
    """Return the engine, which says on its way what it loads and compiles."""
    from serving import Engine  # here, so that --help need not wait for jax

    logger.info("%s", logs.version_line())
    values = dataclasses.asdict(options.engine)
    plain = {module.name: module.path for module in options.adapters if not module.pinned}
    try:
        engine = Engine(values.pop("model"), plain, **values)
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


def _server(options: Options, engine: Any, sock: socket.socket) -> AnnouncingServer:
    """Return the server that will answer on the socket, with its start-up lines logged."""
    from serving.http.app import create_app
    from serving.http.model_names import folder_adapters

    app = create_app(engine, options.http)
    scheme = "https" if "ssl_certfile" in options.uvicorn else "http"
    shown = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    shown = f"[{shown}]" if ":" in shown else shown
    url = f"{scheme}://{shown}:{sock.getsockname()[1]}"
    logs.log_all(logs.adapter_table(engine.registry.entries()))
    logs.log_all(logs.folder_lines(folder_adapters(options.engine.lora_dir)))
    logs.log_all(logs.route_lines(app))
    logger.info("Starting vLLM-compatible server on %s", url)
    lines = logs.ready_lines(url, app.state.server.names.base, options.http.has_api_keys)
    config = uvicorn_config(app, access_log=options.access_log, **options.uvicorn)
    return AnnouncingServer(config, lambda: logs.log_all(lines))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; return 0 after a clean stop and 1 when it cannot start."""
    options = read_options(sys.argv[1:] if argv is None else argv, os.environ)
    logs.configure(options.log_level)
    if options.insecure and not options.http.has_api_keys:
        logger.warning("Everybody who can reach %s can use this server.", options.host)
    try:
        run(options) if options.plan is None else _show_plan(options.engine.model, options.plan)
    except StartError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
