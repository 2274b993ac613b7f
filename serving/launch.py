"""`python -m serving.launch MODEL`: flags, environment and config file become a running server.

vLLM's flag names; SGLang's spellings of the adapter flags work too. A flag wins over its twin in
the environment (SERVING_MAX_LORAS for --max-loras), which wins over the --config file. This is
the only place in `serving` that reads the environment.
"""

import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from serving import logs
from serving.cluster.config import ClusterConfig
from serving.config import EngineConfig
from serving.flags import PREFIX, ParserWithSource, build_parser, lora_module, read_layers
from serving.http.key_file import read_keys_file
from serving.http.settings import HttpSettings, KeyLimits
from serving.http.uvicorn_server import bind
from serving.options import Options, is_loopback
from serving.serve import StartError, serve

__all__ = ["Options", "StartError", "is_loopback", "main", "read_options", "run"]

logger = logging.getLogger("serving.launch")  # also when it runs as __main__

_PLAIN = ("host", "port", "insecure", "log_level", "plan", "metrics_port", "metrics_host")
_SECRETS = ("--api-key", "--admin-api-key", "--metrics-key")


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
    cluster_fields = {f.name for f in dataclasses.fields(ClusterConfig)}
    cluster = ClusterConfig(**{name: given[name] for name in cluster_fields & given.keys()})
    limits = {f.name: given.get(f"key_{f.name}") for f in dataclasses.fields(KeyLimits)}
    settings = HttpSettings(
        served_names=served,
        api_keys=tuple(given.get("api_key", ())),
        admin_keys=tuple(given.get("admin_api_key", ())),
        metrics_keys=tuple(given.get("metrics_key", ())),
        tenants=read_keys_file(given["keys_file"]) if "keys_file" in given else (),
        keys_file=given.get("keys_file"),
        key_limits=KeyLimits(**limits),
        audit_log=given.get("audit_log"),
        enable_runtime_lora=given.get("enable_runtime_lora", False),
        demo=given.get("demo", False),
    )
    plain = {name: given[name] for name in _PLAIN if name in given}
    uvicorn_names = ("ssl_keyfile", "ssl_certfile", "h11_max_incomplete_event_size")
    return Options(
        engine=EngineConfig(model=model, **values),
        http=settings,
        cluster=cluster,
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
        if options.cluster.is_single:
            serve(options, sock)
        else:
            from serving.cluster.front import serve_cluster  # here: most need no other processes

            serve_cluster(options, sock)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; return 0 after a clean stop and 1 when it cannot start."""
    argv = sys.argv[1:] if argv is None else argv
    options = read_options(argv, os.environ)
    logs.configure(options.log_level)
    for flag in _SECRETS:
        if any(word.partition("=")[0] == flag for word in argv):
            twin = PREFIX + flag[2:].upper().replace("-", "_")
            text = "Every user of this machine can read %s in the list of processes; better: %s, "
            logger.warning(text + "or --keys-file with hashed keys.", flag, twin)
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
