"""The command line's flags, and the three places their values come from."""

import argparse
import dataclasses
import json
import shlex
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from serving.cluster.config import ClusterConfig
from serving.config import EngineConfig
from serving.foreign_flags import add_foreign_flags

PREFIX = "SERVING_"
_ENGINE_HELP = {
    "dtype": "auto (what the checkpoint says), float32 or bfloat16",
    "load_format": "auto or safetensors, or dummy: random weights, for measuring speed",
    "max_model_len": "tokens of prompt and answer; by default the model's",
    "max_num_seqs": "sequences in one step",
    "max_num_batched_tokens": "tokens in one step",
    "block_size": "tokens in one KV page",
    "kv_cache_memory_bytes": "bytes for KV pages",
    "gpu_memory_utilization": "share of an accelerator's memory (of what JAX may take of it, see "
    "XLA_PYTHON_CLIENT_MEM_FRACTION) for weights, adapters and KV pages",
    "enable_prefix_caching": "reuse the KV pages of equal prompt beginnings",
    "scheduling_policy": "fcfs, or sjf: the smallest prompt + max_tokens first, which may starve "
    "long requests",
    "max_queue": "waiting sequences before 429",
    "seed": "from which requests without a seed get theirs",
    "max_logprobs": "most log-probabilities a request may ask for per token",
    "chat_template": "a Jinja file that replaces the model's chat template",
    "generation_config": "where requests that set no temperature, top_p, top_k, min_p, "
    "repetition_penalty or (in a chat) max_tokens get them: auto is the model's "
    "generation_config.json, vllm nowhere, anything else a folder with such a file",
    "override_generation_config": "the same values as JSON, over those of the file; max_new_tokens "
    "is a default, not a limit",
    "max_loras": "LoRA adapters on the device at a time; any number may be loaded",
    "max_lora_rank": "largest rank of an adapter",
    "lora_dir": "folder of adapters: model=SUBFOLDER is loaded on first use",
    "max_esft_adapters": "ESFT adapters on the device at a time, 0 turns them off; by default 16 "
    "if the model has experts that can be replaced, on a GPU if they fit beside what jax took",
    "max_esft_experts": "most experts that an ESFT adapter replaces in one layer",
    "esft_memory_bytes": "bytes on the device for ESFT adapters' experts; by default as needed, "
    "on a GPU what is left",
    "lora_memory_bytes": "bytes on the device for adapters; by default max_loras of max_lora_rank",
    "max_adapter_bytes": "largest adapter, all its files together",
    "max_total_adapter_bytes": "host memory of all loaded adapters",
    "max_adapter_loads_per_minute": "adapter loads before requests for more are refused",
    "adapter_wait_s": "longest wait of a request for an adapter slot",
    "adapter_load_chunks_per_step": "pieces of an adapter written to the device between two steps",
    "specialize_lora": "compile decode steps once more for batches without adapters; off halves a "
    "start's time",
}
_CLUSTER_HELP = {
    "instances": "LLM instances, each a process with the whole base model",
    "lora_server": "ranks of the LoRA Server that holds the adapters' experts for all instances",
    "placement": "how the LoRA Server is laid out, e.g. ep2-pp1; by default experts over all ranks",
    "lora_server_adapters": "adapters on the LoRA Server; by default max_loras of each instance",
    "lora_server_memory_bytes": "bytes for adapters on the device of each of its ranks; by default "
    "lora_server_adapters of max_lora_rank",
    "lora_server_wait_s": "longest wait of a layer for the LoRA Server",
    "lora_server_carrier": "what carries rows: auto (by the device's memory), or nixl, over UCX, "
    "which comes with lora-jax[nixl]",
    "lora_attention": "where adapters' attention is: local, on the instances, or remote, on the "
    "LoRA Server too",
    "local_expert_slots": "adapters whose experts an instance computes itself while the LoRA "
    "Server is lost; 0: their requests end with status 503",
    "lora_overlap": "exchange with the LoRA Server behind the base's computation; only to measure",
    "lora_aside": "send rows from a GPU stream of their own, not the step's; only to measure",
    "layerwise_loading": "let a cold adapter serve from its first layer on; only to measure",
    "lora_prefetch": "ask the LoRA Server for an adapter when a request is queued; only to measure",
    "lora_kernel": "kernels of the LoRA Server: fast, or reference (plain JAX); only to measure",
}

_KEY_LIMITS = {
    "max_running": "sequences that run; more wait",
    "max_waiting": "sequences that wait; more are 429",
    "tokens_per_minute": "tokens of prompts and answers in a minute; more are 429",
    "max_adapters": "adapters in host memory that it named",
    "max_adapter_bytes": "their bytes",
}


@dataclasses.dataclass(frozen=True)
class LoraModule:
    """An adapter to load before the server is ready."""

    name: str
    path: str
    pinned: bool = False


class ParserWithSource(argparse.ArgumentParser):
    """Says in errors where a wrong value came from."""

    source = ""

    def error(self, message: str) -> NoReturn:
        super().error(f"{self.source}{message}")


def build_parser() -> ParserWithSource:
    """Return a parser that reports only what was given: defaults live in the dataclasses."""
    parser = ParserWithSource(
        prog="python -m serving.launch",
        usage="%(prog)s MODEL [flags]; --help lists them",
        description="Serve one base model with many LoRA adapters over the OpenAI API.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder of the base model")
    parser.add_argument("--model", help="the same as a flag")
    parser.add_argument("--model-path", dest="model", help=argparse.SUPPRESS)
    parser.add_argument("--config", help="YAML file of flags without their dashes")
    text = "print how large a LoRA Server this workload needs, and end; see serving/plan.py"
    parser.add_argument("--plan", metavar="JSON", help=text)
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the base model"
    )
    _add_server_flags(parser.add_argument_group("server"))
    _add_key_flags(parser.add_argument_group("keys"))
    _add_adapter_flags(parser.add_argument_group("adapters"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_cluster_flags(parser.add_argument_group("several processes"))
    add_foreign_flags(parser)
    return parser


def _add_server_flags(group) -> None:
    group.add_argument("--host", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, help="port to listen on (8000); 0 takes a free one")
    group.add_argument("--ssl-keyfile", help="TLS key")
    group.add_argument("--ssl-certfile", help="TLS certificate")
    group.add_argument(
        "--h11-max-incomplete-event-size",
        type=int,
        metavar="BYTES",
        help="largest request line with headers (65536)",
    )
    levels = ("debug", "info", "warning", "error")
    group.add_argument("--log-level", choices=levels, help="how much to log (info)")
    group.add_argument(
        "--disable-uvicorn-access-log", action="store_true", help="no line per request"
    )
    group.add_argument("--demo", action="store_true", help="serve a page to try adapters at /")


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
        group.add_argument(flag, type=int, metavar="INT", help=f"for each key: {text}")
    group.add_argument("--metrics-port", type=int, help="/metrics without a key at this port")
    group.add_argument("--metrics-host", help="address of --metrics-port (127.0.0.1)")
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
    hidden = argparse.SUPPRESS
    group.add_argument("--lora-paths", dest="lora_modules", action="extend", nargs="+", help=hidden)
    group.add_argument("--max-loras-per-batch", type=int, help=hidden)


def _add_engine_flags(group) -> None:
    """One flag per field of EngineConfig, with the field's own type."""
    for field in dataclasses.fields(EngineConfig):
        if field.name in ("model", "served_model_name"):
            continue
        flag, kind = f"--{field.name.replace('_', '-')}", _plain_type(field.type)
        text = _ENGINE_HELP.get(field.name, "")
        if kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, help=f"{text} ({field.default})")
            continue
        if kind is dict:
            group.add_argument(flag, type=_json_object, metavar="JSON", help=text)
            continue
        default = "" if field.default is None else f" ({field.default})"
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text + default)


def _add_cluster_flags(group) -> None:
    """One flag per field of ClusterConfig, with the field's own type."""
    for field in dataclasses.fields(ClusterConfig):
        kind = _plain_type(field.type)
        default = "" if field.default is None else f" ({field.default})"
        flag, text = f"--{field.name.replace('_', '-')}", _CLUSTER_HELP[field.name] + default
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)


def _plain_type(annotation: Any) -> type:
    """Return int for `int | None`."""
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def _json_object(text: str) -> dict[str, Any]:
    """Return the object, or raise what argparse turns into its message."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object.")
    return value


def read_layers(
    parser: ParserWithSource, argv: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return what was given, by name: the config file, over it the environment, over it argv."""
    from_argv = vars(parser.parse_args(argv))
    parser.source = "in the environment: "
    from_environ = vars(parser.parse_args(_environ_argv(parser, environ)))
    path = from_argv.get("config") or from_environ.get("config")
    parser.source = "in the config file: "
    from_file = vars(parser.parse_args(_file_argv(parser, path))) if path else {}
    parser.source = ""
    return from_file | from_environ | from_argv


def _long_flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the main spelling of every flag by its name with underscores."""
    return {
        action.option_strings[0].lstrip("-").replace("-", "_"): action
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


def _environ_argv(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> list[str]:
    argv: list[str] = []
    for name, action in _long_flags(parser).items():
        value = environ.get(PREFIX + name.upper())
        if value is None:
            continue
        argv += _flag_argv(parser, action, shlex.split(value) if _is_list(action) else value)
    return argv


def _file_argv(parser: ParserWithSource, path: str) -> list[str]:
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        parser.error(f"{path}: {error}")
    if not isinstance(content, dict):
        parser.error(f"{path} must map flags to values.")
    flags, argv = _long_flags(parser), []
    for key, value in content.items():
        action = flags.get(str(key).replace("-", "_"))
        if action is None:
            parser.error(f"unknown flag {key!r}")
        if isinstance(value, dict) and _is_list(action):
            value = [f"{name}={place}" for name, place in value.items()]
        elif isinstance(value, dict):
            value = json.dumps(value)
        argv += _flag_argv(parser, action, value)
    return argv


def _is_list(action: argparse.Action) -> bool:
    return action.nargs == "+"


def _flag_argv(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> list[str]:
    """Return the words that say the same on the command line."""
    flag = action.option_strings[0]
    if action.nargs != 0:
        values = value if isinstance(value, list) else [value]
        return [f"{flag}={values[0]}"] if not _is_list(action) else [flag, *map(str, values)]
    truth = {"1": True, "true": True, "yes": True, "on": True}
    truth |= {"": False, "0": False, "false": False, "no": False, "off": False}
    wanted = truth.get(str(value).lower())
    if wanted is None:
        parser.error(f"{flag} must be true or false, not {value!r}")
    if wanted:
        return [flag]
    return [action.option_strings[1]] if len(action.option_strings) > 1 else []


def lora_module(text: str) -> LoraModule:
    """Return what NAME=PATH, PATH or a JSON object of vLLM or SGLang says, or ValueError."""
    if text.lstrip().startswith("{"):
        return _lora_module_of_json(text)
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text).resolve().name, text
    if not name or not path:
        raise ValueError(f"--lora-modules takes NAME=PATH, not {text!r}.")
    return LoraModule(name, path)


def _lora_module_of_json(text: str) -> LoraModule:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--lora-modules: {text!r} is not JSON: {error}") from None
    known = {"name", "path", "base_model_name", "lora_name", "lora_path", "pinned"}
    unknown = sorted(set(given) - known)
    name, path = (
        given.get("name", given.get("lora_name")),
        given.get("path", given.get("lora_path")),
    )
    pinned = given.get("pinned", False)
    if unknown or not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(f"--lora-modules: {text!r} must have name and path, both text.")
    if not isinstance(pinned, bool):
        raise ValueError(f"--lora-modules: pinned of {name!r} must be true or false.")
    return LoraModule(name, path, pinned)
