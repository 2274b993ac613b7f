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
from serving.cli.flag_layers import ParserWithSource
from serving.cli.flag_values import (
    dtype,
    json_list,
    json_object,
    length_or_auto,
    policy,
    port,
    whole_number,
)
from serving.cli.foreign_flags import add_foreign_flags
from serving.http.settings import REASONING_PARSERS, TOOL_CALL_PARSERS

_TYPES: dict[str, Callable[[str], Any]] = {  # of fields that take more words than their type
    "dtype": dtype,
    "max_model_len": length_or_auto,
    "scheduling_policy": policy,
}
_CHOICES = dict((*config.CHOICES, *cluster_config.CHOICES))
_KEY_LIMITS = {
    "max_running": "sequences that run; more wait",
    "max_waiting": "sequences that wait; more are 429",
    "tokens_per_minute": "tokens of prompts and answers in a minute; more are 429",
    "max_adapters": "adapters in host memory that it named",
    "max_adapter_bytes": "their bytes",
}


def build_parser() -> ParserWithSource:
    """Return a parser that reports only what was given: defaults live in the dataclasses."""
    parser = ParserWithSource(
        prog="python -m serving.launch",
        usage="%(prog)s [serve] MODEL [flags]; --help lists them",
        description="Serve one base model with many LoRA adapters over the OpenAI API.",
        epilog="Every other flag of vLLM is refused with the reason: docs/vllm_flags.md",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder of the base model")
    parser.add_argument("--model", help="the same as a flag")
    parser.add_argument("--model-path", dest="model", help=argparse.SUPPRESS)
    parser.add_argument("--config", help="YAML file of flags without their dashes")
    text = (
        "print how large a LoRA Server this workload needs, and end; see serving/cli/provision.py"
    )
    parser.add_argument("--provision", metavar="JSON", help=text)
    text = "print what a deployment of many adapters needs, and end; see serving/cli/plan.py"
    parser.add_argument("--plan", nargs="?", const="{}", metavar="JSON", help=text)
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the base model"
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_http_flags(parser.add_argument_group("HTTP"))
    _add_log_flags(parser.add_argument_group("log"))
    _add_key_flags(parser.add_argument_group("keys"))
    _add_adapter_flags(parser.add_argument_group("adapters"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_cluster_flags(parser.add_argument_group("several processes"))
    _add_function_flags(parser.add_argument_group("isolated functions"))
    add_foreign_flags(parser)
    return parser


def _add_server_flags(group) -> None:
    group.add_argument("--host", metavar="ADDRESS", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=port, help="port to listen on (8000); 0 takes a free one")
    group.add_argument("--uds", metavar="PATH", help="Unix socket to listen on instead of a port")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="TLS key")
    group.add_argument("--ssl-certfile", metavar="FILE", help="TLS certificate")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="who may sign clients' certificates")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        choices=(0, 1, 2),
        help="whether clients need a certificate: 0 no, 1 if they have one, 2 always (0)",
    )
    group.add_argument(
        "--ssl-ciphers", metavar="CIPHERS", help="TLS ciphers, as OpenSSL lists them"
    )
    group.add_argument(
        "--h11-max-incomplete-event-size",
        type=whole_number,
        metavar="BYTES",
        help="largest request line with headers (65536)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=whole_number,
        metavar="BYTES",
        help="largest body of a request (1024 times the context, in [1 MiB, 16 MiB])",
    )
    text = "open connections; above, the oldest silent one is closed (1000)"
    group.add_argument("--max-connections", type=int, metavar="N", help=text)
    text = "seconds from SIGTERM to the end; streams then end with an error event (25)"
    group.add_argument("--shutdown-timeout", type=float, metavar="SECONDS", help=text)
    group.add_argument("--demo", action="store_true", help="serve a page to try adapters at /")


def _add_http_flags(group) -> None:
    pair = argparse.BooleanOptionalAction
    for flag, text in (
        ("--allowed-origins", "origins whose web pages may call this server, * is any (none)"),
        ("--allowed-methods", "methods that they may use (*)"),
        ("--allowed-headers", "headers that they may send (*)"),
    ):
        group.add_argument(flag, type=json_list, metavar="JSON", help=text)
    group.add_argument("--allow-credentials", action=pair, help="they may send cookies (False)")
    group.add_argument(
        "--root-path", metavar="PATH", help="path under which a proxy offers this server"
    )
    group.add_argument(
        "--disable-fastapi-docs", action=pair, help="no /docs and no /openapi.json (False)"
    )
    group.add_argument("--response-role", metavar="ROLE", help="role of chat answers (assistant)")
    text = "models may call tools by themselves (False)"
    group.add_argument("--enable-auto-tool-choice", action=pair, help=text)
    text = "format of such calls; hermes is Qwen's too (none)"
    group.add_argument("--tool-call-parser", choices=TOOL_CALL_PARSERS, help=text)
    text = "format of thoughts, which are reasoning_content of an answer (none: content)"
    group.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help=text)
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        metavar="JSON",
        help="what the chat template gets beside the messages, under a request's "
        "chat_template_kwargs",
    )
    text = (
        "log-probabilities name tokens as token_id:NUMBER unless a request says otherwise (False)"
    )
    group.add_argument("--return-tokens-as-token-ids", action=pair, help=text)
    text = "hosts whose images may be fetched by http(s) URLs; public addresses only (none)"
    group.add_argument("--allowed-media-domains", nargs="+", metavar="HOST", help=text)
    text = "folder whose images file: URLs may name (none)"
    group.add_argument("--allowed-local-media-path", metavar="DIR", help=text)
    text = "every stream ends with its usage (False)"
    group.add_argument("--enable-force-include-usage", action=pair, help=text)
    group.add_argument(
        "--sse-keep-alive-interval",
        type=float,
        metavar="SECONDS",
        help="silence of a stream before a comment is sent, for proxies that cut it; 0 never (0)",
    )


def _add_log_flags(group) -> None:
    pair = argparse.BooleanOptionalAction
    levels = ("debug", "info", "warning", "error", "critical")
    group.add_argument("--log-level", type=str.lower, choices=levels, help="how much to log (info)")
    group.add_argument(
        "--uvicorn-log-level",
        choices=("trace", *levels),
        help="how much the HTTP server itself logs; by default as --log-level",
    )
    text = "no line per HTTP request (False)"
    group.add_argument("--disable-uvicorn-access-log", action=pair, help=text)
    group.add_argument(
        "--disable-access-log-for-endpoints",
        type=json_list,
        metavar="PATH,PATH",
        help="paths without such lines, beside probes",
    )
    text = "a line per request for text: its model, numbers and sampling, never its words (False)"
    group.add_argument("--enable-log-requests", action=pair, help=text)
    group.add_argument(
        "--disable-log-stats", action="store_true", help="no line of rates every ten seconds"
    )


def _add_key_flags(group) -> None:
    for flag, text in (
        ("--api-key", "key that clients must send; better given as SERVING_API_KEY"),
        ("--admin-api-key", "key for loading and unloading adapters"),
        ("--metrics-key", "key for /metrics only, for Prometheus"),
    ):
        group.add_argument(flag, action="extend", nargs="+", metavar="KEY", help=text)
    text = "API keys, hashed or plain, with their adapters, roles and limits; read again on change"
    group.add_argument("--keys-file", metavar="FILE", help=text)
    for field, text in _KEY_LIMITS.items():
        flag = f"--key-{field.replace('_', '-')}"
        group.add_argument(flag, type=int, metavar="N", help=f"for each key: {text}")
    group.add_argument("--metrics-port", type=port, help="/metrics without a key at this port")
    group.add_argument(
        "--metrics-host", metavar="ADDRESS", help="address of --metrics-port (127.0.0.1)"
    )
    text = "file for a line of JSON per load, unload, refusal and wrong key"
    group.add_argument("--audit-log", metavar="FILE", help=text)
    group.add_argument(
        "--insecure", action="store_true", help="listen on the network without a key"
    )


def _add_adapter_flags(group) -> None:
    text = "adapters to load at start: NAME=PATH or JSON with name and path"
    group.add_argument("--lora-modules", action="extend", nargs="+", metavar="NAME=PATH", help=text)
    group.add_argument(
        "--enable-runtime-lora",
        action="store_true",
        help="let clients load adapters from --lora-dir and unload them; needs the admin key if "
        "there is one (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is its twin)",
    )
    text = "folder that records such loads, so that they outlast this server"
    group.add_argument("--state-dir", metavar="FOLDER", help=text)
    hidden = argparse.SUPPRESS
    group.add_argument("--lora-paths", dest="lora_modules", action="extend", nargs="+", help=hidden)
    group.add_argument("--max-loras-per-batch", type=int, help=hidden)


def _add_engine_flags(group) -> None:
    """One flag per field of EngineConfig, with the field's own type."""
    for field in dataclasses.fields(EngineConfig):
        if field.name not in ("model", "served_model_name"):
            _add_field(group, field, ENGINE_HELP)
    hidden, number = argparse.SUPPRESS, whole_number  # SGLang's names
    group.add_argument("--context-length", dest="max_model_len", type=number, help=hidden)
    group.add_argument("--max-running-requests", dest="max_num_seqs", type=number, help=hidden)


def _add_cluster_flags(group) -> None:
    """One flag per field of ClusterConfig, with the field's own type."""
    for field in dataclasses.fields(ClusterConfig):
        _add_field(group, field, CLUSTER_HELP)
    text = "vLLM's name of --instances"
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
    if kind is dict:
        group.add_argument(flag, type=json_object, metavar="JSON", help=text)
        return
    if field.default is not None:
        text += f" ({field.default})"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        return
    read = _TYPES.get(field.name, whole_number if kind is int else kind)
    group.add_argument(flag, type=read, metavar=_metavar(field.name, kind), help=text)


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
