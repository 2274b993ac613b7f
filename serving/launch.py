"""`python -m serving.launch MODEL`: flags, environment and config file become a running server.

vLLM's flag names; SGLang's spellings of the adapter flags work too. A flag wins over its twin in
the environment (SERVING_MAX_LORAS for --max-loras), which wins over the --config file. This is
the only place in `serving` that reads the environment.
"""

import dataclasses
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from serving.api.cluster_config import ClusterConfig
from serving.api.config import GIVEN_MODULES, EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.flag_layers import ParserWithSource, read_layers
from serving.cli.flag_values import lora_module
from serving.cli.flag_words import PREFIX
from serving.cli.flags import build_parser
from serving.cli.installed import check_installed
from serving.cli.model_flags import check_model_flags
from serving.cli.options import Options, is_loopback
from serving.cli.paths import check_paths
from serving.cli.serve import StartError, serve
from serving.cli.start_files import check_start_files
from serving.cli.vllm_variables import without_effect
from serving.cluster.nodes.seats import seats_of
from serving.engine.images.sources import MediaPolicy
from serving.engine.metrics import logs
from serving.http.access.key_file import read_keys_file
from serving.http.settings import NEVER_S, Cors, HttpSettings, KeyLimits
from serving.http.wire.uvicorn_server import bind, bind_unix
from serving.runtime.role_host import AbstractRoleHosts
from serving.runtime.visible_gpus import VISIBLE, check_count, count_visible

__all__ = ["Options", "StartError", "command", "is_loopback", "main", "read_options", "run"]

logger = logging.getLogger("serving.launch")  # also when it runs as __main__

INTERRUPTED = 128 + signal.SIGINT  # status of a start that Ctrl-C ended
# What answers clients, which a host that follows rank 0 does not.
_OF_RANK_0 = ("keys_file", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
_OF_RANK_0 += ("ssl_ciphers",)
_SECRETS = ("--api-key", "--admin-api-key", "--metrics-key")


def read_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options; a mistake ends the process with status 2 and a message that names it."""
    parser = build_parser()
    given = read_layers(parser, argv, environ)
    if environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"):
        given.setdefault("enable_runtime_lora", True)
    if environ.get("VLLM_API_KEY"):
        given.setdefault("api_key", [environ["VLLM_API_KEY"]])
    try:
        return _options(parser, given)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _options(parser: ParserWithSource, given: dict[str, Any]) -> Options:
    model = given.get("model_tag") or given.get("model")
    if not model:
        parser.error("no model is given; start with its folder: python -m serving.launch FOLDER")
    cluster = ClusterConfig(**_given_fields(ClusterConfig, given))
    if cluster.follows:
        given = {name: value for name, value in given.items() if name not in _OF_RANK_0}
    functions = FunctionsConfig(**_given_fields(FunctionsConfig, given))
    names = ("host", "port", "uds", "insecure", "log_level", "provision", "plan", "quantization")
    names += ("log_stats", "quiet_paths", "access_log")
    names += ("state_dir", "max_connections", "shutdown_timeout", "metrics_port", "metrics_host")
    given = {"quiet_paths": given.get("disable_access_log_for_endpoints", ())} | given
    given["log_stats"] = not given.get("disable_log_stats", False)
    given["access_log"] = not given.get("disable_uvicorn_access_log", False)
    uvicorn_names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
    uvicorn_names += ("h11_max_incomplete_event_size",)
    uvicorn = {name: given[name] for name in uvicorn_names if name in given}
    if "uvicorn_log_level" in given:
        uvicorn["log_level"] = given["uvicorn_log_level"]
    others = "lora_dir" in given or given.get("enable_runtime_lora")
    if given.get("lora_modules") and not (others or cluster.lora_server):
        given.setdefault("lora_target_modules", GIVEN_MODULES)
    return Options(
        engine=_engine_config(model, given),
        http=_http_settings(given),
        cluster=cluster,
        functions=functions,
        adapters=tuple(lora_module(text) for text in given.get("lora_modules", ())),
        uvicorn=uvicorn,
        **{name: given[name] for name in names if name in given},
    )


def _given_fields(config: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(config)}
    return {name: given[name] for name in names & given.keys()}


def _engine_config(model: str, given: Mapping[str, Any]) -> EngineConfig:
    fields = {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "served_model_name"}
    values = {name: given[name] for name in fields & given.keys()}
    if served := given.get("served_model_name"):
        values["served_model_name"] = served[0]
    return EngineConfig(model=model, **values)


_HTTP_FLAGS = {  # by the setting that each of them is
    "enable_runtime_lora": "enable_runtime_lora",
    "demo": "demo",
    "root_path": "root_path",
    "response_role": "response_role",
    "enable_auto_tool_choice": "enable_auto_tool_choice",
    "tool_call_parser": "tool_call_parser",
    "reasoning_parser": "reasoning_parser",
    "default_template_kwargs": "default_chat_template_kwargs",
    "tokens_as_ids": "return_tokens_as_token_ids",
    "force_include_usage": "enable_force_include_usage",
    "log_requests": "enable_log_requests",
    "max_body_bytes": "max_body_bytes",
}


def _http_settings(given: Mapping[str, Any]) -> HttpSettings:
    values = {name: given[flag] for name, flag in _HTTP_FLAGS.items() if flag in given}
    if origins := given.get("allowed_origins"):
        parts = {"methods": "allowed_methods", "headers": "allowed_headers"}
        more = {name: given[flag] for name, flag in parts.items() if flag in given}
        values["cors"] = Cors(origins, credentials=given.get("allow_credentials", False), **more)
    if "sse_keep_alive_interval" in given:
        values["keep_alive_s"] = given["sse_keep_alive_interval"] or NEVER_S
    domains = frozenset(host.lower() for host in given.get("allowed_media_domains", ()))
    values["media"] = MediaPolicy(domains, given.get("allowed_local_media_path"))
    limits = {f.name: given.get(f"key_{f.name}") for f in dataclasses.fields(KeyLimits)}
    return HttpSettings(
        served_names=tuple(given.get("served_model_name", ())),
        api_keys=tuple(given.get("api_key", ())),
        admin_keys=tuple(given.get("admin_api_key", ())),
        metrics_keys=tuple(given.get("metrics_key", ())),
        tenants=read_keys_file(given["keys_file"]) if "keys_file" in given else (),
        keys_file=given.get("keys_file"),
        key_limits=KeyLimits(**limits),
        audit_log=given.get("audit_log"),
        docs=not given.get("disable_fastapi_docs", False),
        **values,
    )


def run(options: Options) -> None:
    """Load everything, serve until SIGTERM or SIGINT, close. Raises StartError."""
    if not options.cluster.is_single:
        _require_gpus(options, os.environ)
    if options.cluster.node_rank:
        from serving.cluster.nodes.agent import serve_agent  # here: of few

        serve_agent(options)
        return
    with ExitStack() as stack:
        sock = _listen(options)
        stack.callback(sock.close)
        if options.functions.functions is not None and options.cluster.is_single:
            from serving.cluster.functions_front import serve_functions

            serve_functions(options, sock)
        elif options.cluster.is_single:
            serve(options, sock)
        else:
            if options.cluster.uses_ray:
                from serving.cluster.ray.joining import check_ray  # here: of few

                check_ray(options)
            nodes = _nodes_of(options, stack)
            from serving.cluster.front import serve_cluster  # here: most need no other processes

            serve_cluster(options, sock, nodes)


def _require_gpus(options: Options, environ: Mapping[str, str]) -> None:
    """Raise StartError where this host has fewer GPUs than its roles need.

    A process without a GPU of its own would compute on the CPU.
    """
    cluster = options.cluster
    if cluster.uses_ray:  # which knows the hosts' GPUs
        return
    visible = environ.get(VISIBLE)
    if visible is None and environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return
    _require_one_agent(options, visible)
    devices, what = options.engine.tensor_parallel_size, f"{cluster.instances} instances"
    count = cluster.instances * devices + cluster.lora_server
    if cluster.has_nodes:
        sizes = cluster.instances, devices, cluster.lora_server, cluster.nnodes
        seats = [seat for some in seats_of(*sizes).values() for seat in some]
        count = sum(seat.num_gpus for seat in seats if seat.node == cluster.node_rank)
        what = f"the processes of node {cluster.node_rank}"
    try:
        check_count(visible, count)
    except ValueError as error:
        raise StartError(f"Cannot start {what}: {error}") from None


def _require_one_agent(options: Options, visible: str | None) -> None:
    """Raise StartError for several instances whose adapters' processes would share their GPUs."""
    apart = options.functions.functions_isolation == "server"
    if apart and options.cluster.instances > 1 and count_visible(visible):
        raise StartError(
            "--functions-isolation server takes two GPUs for one instance, and is for one of them: "
            f"leave --instances {options.cluster.instances} out, or use --functions-isolation "
            "process."
        )


def _nodes_of(options: Options, stack: ExitStack) -> AbstractRoleHosts | None:
    """Return the hosts of --nnodes, which the stack closes; None for one host, and for Ray's.

    They are met before the front imports jax: one that does not fit is told at once.
    """
    if not options.cluster.has_nodes:
        return None
    from serving.cluster.nodes.hosts import meet_nodes  # here: of few

    nodes = meet_nodes(options)
    stack.callback(nodes.close)
    return nodes


def _check_installed() -> None:
    """Raise StartError, before anything is loaded, where the version line would fail."""
    try:
        check_installed()
    except ValueError as error:
        raise StartError(str(error)) from None


def _show_provisioning(model: str, workload: str) -> None:
    """Print how large a LoRA Server the workload file needs."""
    from serving.cli.provision import provisioning_of_files

    try:
        text = provisioning_of_files(model, workload)
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot size the LoRA Server: {error}") from error
    print(text)


def _show_plan(options: Options, text: str) -> None:
    """Print what a deployment of many adapters over the model needs."""
    from serving.cli.folder_plan import plan_of_folder  # here: it imports jax

    try:
        print(plan_of_folder(options.engine, text, [a.path for a in options.adapters]))
    except (ValueError, OSError) as error:
        raise StartError(f"--plan: {error}") from error


def _listen(options: Options) -> socket.socket:
    """Take the port before the model is loaded: a taken one is found out at once."""
    address = options.uds or f"{options.host}:{options.port}"
    try:
        return bind_unix(options.uds) if options.uds else bind(options.host, options.port)
    except OSError as error:
        other = "" if options.uds else " --port chooses another one, 0 a free one."
        reason = error.strerror or str(error)
        raise StartError(f"Cannot listen on {address}: {reason}.{other}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; return 0 after a clean stop, 1 when it cannot start, 130 after Ctrl-C
    during the start.

    A mistake on the command line ends the process with status 2, a path that leads nowhere too.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = read_options(argv, os.environ)
    try:
        check_paths(options)
        check_model_flags(options)
        if options.plan is None and options.provision is None:
            check_start_files(options)
    except (ValueError, LookupError, OSError) as error:
        build_parser().error(str(error))
    logs.configure(options.log_level, options.quiet_paths)
    for flag in _SECRETS:
        if any(word.partition("=")[0] == flag for word in argv):
            twin = PREFIX + flag[2:].upper().replace("-", "_")
            text = "Every user of this machine can read %s in the list of processes; better: %s, "
            logger.warning(text + "or --keys-file with hashed keys.", flag, twin)
    if options.insecure and not (options.http.has_api_keys or options.cluster.follows):
        logger.warning(
            "No API key: every client that reaches %s can use this server.", options.host
        )
    for line in without_effect(os.environ):
        logger.warning("A variable of vLLM has no effect here. %s.", line)
    try:
        if options.plan is not None:
            _show_plan(options, options.plan)
        elif options.provision is not None:
            _show_provisioning(options.engine.model, options.provision)
        else:
            _check_installed()
            run(options)
    except StartError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        logger.info("Interrupted: the server ends without waiting for what it began.")
        return INTERRUPTED
    return 0


def _end(status: int) -> NoReturn:
    """End the process; after Ctrl-C by that signal, which waits for no thread that compiles."""
    if status == INTERRUPTED:
        logging.shutdown()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(status)


def command() -> NoReturn:
    """Run the server as `lora-jax` and as `python -m serving.launch`: see `main`."""
    _end(main())


if __name__ == "__main__":
    command()
