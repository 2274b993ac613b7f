"""The command line's flags: vLLM's names, one per field of a configuration, and some of HTTP."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from serving.api import cluster_config, config
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.flag_help import CLUSTER_HELP, ENGINE_HELP, FUNCTIONS_HELP, METAVARS
from serving.cli.flag_layers import ParserWithSource, Switch
from serving.cli.flag_values import (
    beside_base,
    dtype,
    json_list,
    json_object,
    kv_cache_dtype,
    length_or_auto,
    named_parser,
    policy,
    port,
    whole_number,
)
from serving.cli.foreign_flags import add_foreign_flags
from serving.cli.peer_reasons import REASONING_NAMES, TOOL_PARSERS
from serving.http.settings import REASONING_PARSERS, TOOL_CALL_PARSERS

_TYPES: dict[str, Callable[[str], Any]] = {  # of fields that take more words than their type
    "dtype": dtype,
    "kv_cache_dtype": kv_cache_dtype,
    "max_model_len": length_or_auto,
    "scheduling_policy": policy,
}
# Words in the names of fields that are about adapters, or about images.
_OF_ADAPTERS = {"lora", "loras", "esft", "adapter", "dora", "base"}
_OF_IMAGES = {"mm", "encoder", "language"}
_CHOICES = dict((*config.CHOICES, *cluster_config.CHOICES))
_KEY_LIMITS = {
    "max_running": ("N", "running sequences of one key. Further ones wait"),
    "max_waiting": ("N", "waiting sequences of one key. A request beyond it gets status 429"),
    "tokens_per_minute": (
        "N",
        "tokens of prompts and answers of one key in a minute. A request beyond it gets status 429",
    ),
    "max_adapters": ("N", "adapters in host memory that requests of one key loaded"),
    "max_adapter_bytes": (
        "BYTES",
        "bytes of adapters in host memory that requests of one key loaded",
    ),
}


def build_parser() -> ParserWithSource:
    """Return a parser that reports only what was given: defaults live in the dataclasses."""
    parser = ParserWithSource(
        prog="python -m serving.launch",
        usage="%(prog)s [serve] MODEL [flags]; --help lists them",
        description="Serve one base model with many LoRA adapters over the OpenAI API.",
        epilog="Any other flag of vLLM is rejected with the reason: docs/vllm_flags.md",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="Folder of the base model.")
    parser.add_argument(
        "--model", metavar="DIR", help="Folder of the base model, in place of MODEL."
    )
    text = "YAML file of flags, named without leading dashes. Default: none."
    parser.add_argument("--config", metavar="FILE", help=text)
    text = (
        "Print the size of the LoRA Server that a workload file asks for, then exit. "
        "serving/cli/provision.py describes the file."
    )
    parser.add_argument("--provision", metavar="FILE", help=text)
    text = (
        "Print the devices and memory that a deployment of many adapters needs, then exit. "
        "docs/how-to/plan-a-deployment.md describes the JSON."
    )
    parser.add_argument("--plan", nargs="?", const="{}", metavar="JSON", help=text)
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="Names of the base model in requests. Default: the folder's name.",
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_http_flags(parser.add_argument_group("HTTP"))
    _add_log_flags(parser.add_argument_group("log"))
    _add_key_flags(parser.add_argument_group("keys"))
    adapters = parser.add_argument_group("adapters")
    engine, images = (parser.add_argument_group(title) for title in ("engine", "images"))
    _add_adapter_flags(adapters)
    _add_engine_flags(adapters, engine, images)
    _add_cluster_flags(parser.add_argument_group("several processes"))
    _add_function_flags(parser.add_argument_group("isolated functions"))
    add_foreign_flags(parser)
    return parser


def _add_server_flags(group) -> None:
    text = "Address to listen on. Default: 127.0.0.1."
    group.add_argument("--host", metavar="ADDRESS", help=text)
    text = "Port to listen on. 0: a free one. Default: 8000."
    group.add_argument("--port", type=port, metavar="PORT", help=text)
    text = "Unix socket to listen on instead of a port."
    group.add_argument("--uds", metavar="PATH", help=text)
    group.add_argument("--ssl-keyfile", metavar="FILE", help="File of the TLS key.")
    group.add_argument("--ssl-certfile", metavar="FILE", help="File of the TLS certificate.")
    text = "File of the authorities that sign client certificates."
    group.add_argument("--ssl-ca-certs", metavar="FILE", help=text)
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        help="Check of client certificates. 0: none. 1: of those that clients send. 2: required. "
        "Default: 0.",
    )
    group.add_argument("--ssl-ciphers", metavar="CIPHERS", help="TLS ciphers, in OpenSSL's format.")
    group.add_argument(
        "--h11-max-incomplete-event-size",
        type=whole_number,
        metavar="BYTES",
        help="Maximum size of request line and headers, in bytes. Default: 65536.",
    )
    group.add_argument(
        "--max-body-bytes",
        type=whole_number,
        metavar="BYTES",
        help="Maximum size of a request body, in bytes. Default: 1024 times --max-model-len, "
        "in [1 MiB, 16 MiB].",
    )
    text = (
        "Maximum open connections. Beyond it the connection that was idle longest is closed. "
        "Default: 1000."
    )
    group.add_argument("--max-connections", type=int, metavar="N", help=text)
    text = (
        "Time from SIGTERM to the end, in seconds. Open streams then end with an error event. "
        "Default: 25."
    )
    group.add_argument("--shutdown-timeout", type=float, metavar="SECONDS", help=text)
    group.add_argument("--demo", action="store_true", help="Serve a demo page at /.")


def _add_http_flags(group) -> None:
    pair = Switch
    for flag, text in (
        (
            "--allowed-origins",
            "Origins whose web pages may call this server. '*': any. Default: [].",
        ),
        (
            "--allowed-methods",
            'HTTP methods that web pages of --allowed-origins may use. Default: ["*"].',
        ),
        (
            "--allowed-headers",
            'Headers that web pages of --allowed-origins may send. Default: ["*"].',
        ),
    ):
        group.add_argument(flag, type=json_list, metavar="JSON", help=text)
    text = "Let web pages of --allowed-origins send cookies. Default: off."
    group.add_argument("--allow-credentials", action=pair, help=text)
    group.add_argument("--root-path", metavar="PATH", help="Path prefix that a proxy removes.")
    group.add_argument(
        "--disable-fastapi-docs", action=pair, help="No /docs and /openapi.json. Default: off."
    )
    text = "Role of chat answers. Default: assistant."
    group.add_argument("--response-role", metavar="ROLE", help=text)
    text = 'Allow tool_choice "auto": the model decides about tool calls. Default: off.'
    group.add_argument("--enable-auto-tool-choice", action=pair, help=text)
    text = "Format of the model's tool calls. hermes: Qwen's too. Default: none."
    named = named_parser(TOOL_PARSERS)
    group.add_argument("--tool-call-parser", type=named, choices=TOOL_CALL_PARSERS, help=text)
    text = (
        "Format of the model's thoughts, which answers then have as reasoning. "
        "Default: none, reasoning stays in content."
    )
    named = named_parser(REASONING_NAMES)
    group.add_argument("--reasoning-parser", type=named, choices=REASONING_PARSERS, help=text)
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="Arguments of the chat template. A request's chat_template_kwargs replace them. "
        "Default: {}.",
    )
    text = (
        "Write tokens as token_id:NUMBER in log-probabilities, unless a request says otherwise. "
        "Default: off."
    )
    group.add_argument("--return-tokens-as-token-ids", action=pair, help=text)
    text = (
        "Hosts from which images of http(s) URLs are fetched. Private addresses are rejected. "
        "Default: none."
    )
    group.add_argument("--allowed-media-domains", nargs="+", metavar="HOST", help=text)
    text = "Folder from which images of file: URLs are read. Default: none."
    group.add_argument("--allowed-local-media-path", metavar="DIR", help=text)
    text = "Send usage at the end of every stream. Default: off."
    group.add_argument("--enable-force-include-usage", action=pair, help=text)
    group.add_argument(
        "--sse-keep-alive-interval",
        type=float,
        metavar="SECONDS",
        help="Idle time of a stream before a comment is sent, in seconds, for proxies that "
        "close idle connections. 0: never. Default: 0.",
    )


def _add_log_flags(group) -> None:
    pair = Switch
    levels = ("debug", "info", "warning", "error", "critical")
    text = "Lowest level that is logged. Default: info."
    group.add_argument("--log-level", type=str.lower, choices=levels, help=text)
    group.add_argument(
        "--uvicorn-log-level",
        choices=("trace", *levels),
        help="Lowest level that uvicorn, the HTTP server, logs. Default: --log-level.",
    )
    text = "Do not log a line per HTTP request. Default: off."
    group.add_argument("--disable-uvicorn-access-log", action=pair, help=text)
    group.add_argument(
        "--disable-access-log-for-endpoints",
        type=json_list,
        metavar="PATH,PATH",
        help="Paths whose requests are not logged. Requests of probes never are. Default: none.",
    )
    text = (
        "Log model, token counts and sampling of each request for text, never its text. "
        "Default: off."
    )
    group.add_argument("--enable-log-requests", action=pair, help=text)
    group.add_argument(
        "--disable-log-stats", action="store_true", help="Do not log rates every ten seconds."
    )


def _add_key_flags(group) -> None:
    for flag, text in (
        ("--api-key", "Key that clients must send. The variable SERVING_API_KEY hides it from ps."),
        ("--admin-api-key", "Key for loading and unloading adapters. Without one any client may."),
        ("--metrics-key", "Key that is valid for /metrics only."),
    ):
        group.add_argument(flag, action="extend", nargs="+", metavar="KEY", help=text)
    text = (
        "YAML or JSON-lines file of API keys with their adapters, roles and limits. It is read "
        "again when it changes."
    )
    group.add_argument("--keys-file", metavar="FILE", help=text)
    for field, (metavar, text) in _KEY_LIMITS.items():
        flag, text = f"--key-{field.replace('_', '-')}", f"Maximum {text}. Default: no limit."
        group.add_argument(flag, type=int, metavar=metavar, help=text)
    text = "Port that serves /metrics without a key. Default: none."
    group.add_argument("--metrics-port", type=port, metavar="PORT", help=text)
    text = "Address of --metrics-port. Default: 127.0.0.1."
    group.add_argument("--metrics-host", metavar="ADDRESS", help=text)
    text = (
        "File that gets a line of JSON per load, unload, rejected load and wrong key. "
        "Default: none."
    )
    group.add_argument("--audit-log", metavar="FILE", help=text)
    group.add_argument("--insecure", action="store_true", help="Allow the network without a key.")


def _add_adapter_flags(group) -> None:
    text = "Adapters to load at the start: NAME=PATH, or JSON with name and path."
    group.add_argument("--lora-modules", action="extend", nargs="+", metavar="NAME=PATH", help=text)
    group.add_argument(
        "--enable-runtime-lora",
        action="store_true",
        help="Let clients load adapters of --lora-dir and unload them, with the admin key if "
        "there is one. Environment: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
    )
    text = (
        "Folder that records adapter loads of clients, so that a restart repeats them. "
        "Default: none."
    )
    group.add_argument("--state-dir", metavar="FOLDER", help=text)
    hidden, number = argparse.SUPPRESS, beside_base  # SGLang's name
    group.add_argument("--max-loras-per-batch", dest="max_loras", type=number, help=hidden)


def _add_engine_flags(adapters, group, images) -> None:
    """One flag per field of EngineConfig, with the field's own type, in the group of its subject.

    `group` has those that are about neither adapters nor images.
    """
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("model", "served_model_name"):
            words = set(field.name.split("_"))
            subject = adapters if words & _OF_ADAPTERS else images if words & _OF_IMAGES else group
            _add_field(subject, field, ENGINE_HELP)
    text = (
        "Format that the model's config.json has to name: vLLM's flag, checked and then ignored. "
        "Default: no check."
    )
    group.add_argument("--quantization", metavar="FORMAT", help=text)


def _add_cluster_flags(group) -> None:
    """One flag per field of ClusterConfig, with the field's own type."""
    for field in dataclasses.fields(ClusterConfig):
        _add_field(group, field, CLUSTER_HELP)
    text = "The same as --instances."
    group.add_argument(
        "--data-parallel-size", dest="instances", type=whole_number, metavar="N", help=text
    )


def _add_function_flags(group) -> None:
    """One flag per field of FunctionsConfig, with the field's own type."""
    for field in dataclasses.fields(FunctionsConfig):
        _add_field(group, field, FUNCTIONS_HELP)


def _add_field(group, field: dataclasses.Field, texts: Mapping[str, str]) -> None:
    """Add the flag of one field, with its default in the help."""
    flag, kind, text = (
        f"--{field.name.replace('_', '-')}",
        _plain_type(field.type),
        texts[field.name],
    )
    if typing.get_origin(kind) is tuple:
        group.add_argument(flag, nargs="+", metavar=_metavar(field.name, str), help=text)
        return
    if kind is dict:
        group.add_argument(flag, type=json_object, metavar="JSON", help=text)
        return
    if field.default is not None:
        text += f" Default: {_spelled(field.default)}."
    if kind is bool:
        group.add_argument(flag, action=Switch, help=text)
        return
    read = _TYPES.get(field.name, whole_number if kind is int else kind)
    group.add_argument(flag, type=read, metavar=_metavar(field.name, kind), help=text)


def _spelled(default: Any) -> str:
    """Return a default value as a reader would write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int) and default >= 1 << 30 and default % (1 << 30) == 0:
        return f"{default} ({default >> 30} GiB)"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _metavar(name: str, kind: type) -> str:
    """Return what --help calls the value of a field: its choices where it has some."""
    if name in _CHOICES:
        return "{" + ",".join(_CHOICES[name]) + "}"
    by_kind = {int: "BYTES" if "bytes" in name else "N", float: "NUMBER"}
    return METAVARS.get(name) or by_kind.get(kind, "NAME")


def _plain_type(annotation: Any) -> type:
    """Return int for `int | None`."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation
