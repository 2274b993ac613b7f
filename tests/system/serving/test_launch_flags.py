"""The options of a command line and of its environment, and errors that name a flag."""

import argparse
import dataclasses

import pytest

from serving import launch
from serving.api.cluster_config import ClusterConfig
from serving.cli.flag_values import LoraModuleFlag
from serving.cli.flags import build_parser
from serving.http.settings import Cors
from serving.launch import is_loopback, read_options


def options(*argv: str, **environ: str) -> launch.Options:
    return read_options(["m", *argv], environ)


def refused(capsys, *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as stop:
        options(*argv, **environ)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_defaults_are_safe():
    got = options()
    assert (got.engine.model, got.host, got.port) == ("m", "127.0.0.1", 8000)
    assert not got.http.enable_runtime_lora
    assert not got.http.demo
    assert got.access_log


@pytest.mark.parametrize(
    ("more", "modules"),
    [
        ([], ("auto",)),
        (["--lora-target-modules", "q_proj", "v_proj"], ("q_proj", "v_proj")),
        (["--lora-dir", "d"], None),
        (["--enable-runtime-lora"], None),
        (["--lora-server", "1"], None),
    ],
)
def test_where_no_other_adapters_can_come_lora_is_on_what_they_change(more, modules):
    assert options("--lora-modules", "x=p", *more).engine.lora_target_modules == modules
    assert options().engine.lora_target_modules is None


# A value other than the default, for flags whose text is not enough.
VALUES = {
    "nnodes": "2",
    "node_rank": "1",
    "allowed_origins": '["http://a"]',
    "allowed_methods": '["GET"]',
    "allowed_headers": '["x"]',
    "default_chat_template_kwargs": '{"a": 1}',
    "override_generation_config": '{"top_k": 3}',
    "host": "::1",
    "lora_modules": "x=p",
    "placement": "ep2-pp1",
    "root_path": "/p",
    "uvicorn_log_level": "trace",
    "disable_access_log_for_endpoints": "/x",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_num_batched_tokens": "64",
    "gpu_memory_utilization": "0.5",
    "scheduling_policy": "sjf",
    "lora_attention": "remote",
    "lora_server_transport": "nixl",
    "distributed_executor_backend": "ray",
    "functions_isolation": "none",
    "lora_kernel": "reference",
    "allowed_local_media_path": "/",
    "limit_mm_per_prompt": '{"image": 3}',
    "mm_processor_kwargs": '{"max_pixels": 50176}',
    "kv_cache_dtype": "fp8",
    "lora_dtype": "int8",
    "lora_merge": "auto",
    "merge_adapter": "x",
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}',
}


# Others that a flag says nothing without.
OF_A_KEY, OF_A_LORA_SERVER = ["--api-key", "k"], ["--instances", "2", "--lora-server", "2"]
OF_NODES = ["--tensor-parallel-size", "2", "--nodes-secret-file", "s"]


NEEDS = {
    "nnodes": OF_NODES,
    "node_rank": [*OF_NODES, "--nnodes", "2"],
    "headless": [*OF_NODES, "--nnodes", "2", "--node-rank", "1"],
    "allowed_methods": ["--allowed-origins", '["http://a"]'],
    "allowed_headers": ["--allowed-origins", '["http://a"]'],
    "allow_credentials": ["--allowed-origins", '["http://a"]'],
    "enable_auto_tool_choice": ["--tool-call-parser", "hermes"],
    "lora_server": ["--instances", "2"],
    "merge_adapter": ["--instances", "2", "--lora-modules", "x=p"],
    "functions_keep_alive_s": ["--functions", "f"],
    "functions_memory_bytes": ["--functions", "f"],
    "functions_ttft_slo_s": ["--functions", "f"],
    "functions_isolation": ["--functions", "f"],
    "functions_max_tenants": ["--functions", "f", "--functions-isolation", "server"],
    "functions_verify_s": ["--functions", "f"],
    "enable_expert_parallel": ["--tensor-parallel-size", "2"],
}


def own_flags() -> list[argparse.Action]:
    """Every flag of ours that a server is started with."""
    elsewhere = ("help", "config", "model", "model_tag", "keys_file")
    shown = [a for a in build_parser()._actions if a.option_strings and a.help != argparse.SUPPRESS]
    groups = [group for group in build_parser()._action_groups if "vLLM" in (group.title or "")]
    foreign = {name for group in groups for a in group._group_actions for name in a.option_strings}
    return [a for a in shown if a.dest not in elsewhere and a.option_strings[0] not in foreign]


@pytest.mark.parametrize("flag", own_flags(), ids=lambda flag: flag.dest)
def test_every_flag_changes_the_options(flag):
    """A flag that is parsed and then dropped would be ignored in silence."""
    of_server = flag.dest in {f.name for f in dataclasses.fields(ClusterConfig)} - {"instances"}
    more = OF_A_KEY if flag.dest.startswith("key_") else OF_A_LORA_SERVER if of_server else []
    more = NEEDS.get(flag.dest, more)
    first, before = flag.option_strings[0], options(*more)
    if flag.nargs == 0:
        on = isinstance(flag, argparse.BooleanOptionalAction)
        given = [[first], [flag.option_strings[1]]] if on else [[first]]
    elif flag.choices:
        given = [[first, str(choice)] for choice in flag.choices]
    else:
        given = [[first, VALUES.get(flag.dest, "7")]]
    assert any(options(*more, *words) != before for words in given)


def test_flags_reach_their_places():
    got = options(
        *["--max-loras", "3", "--max-model-len", "64", "--lora-dir", "d", "--port", "1"],
        *["--api-key", "a", "b", "--admin-api-key", "c", "--metrics-key", "e", "--demo"],
        *["--lora-modules", "x=p", '{"name": "y", "path": "q"}', "--enable-runtime-lora"],
        *["--served-model-name", "one", "two", "--disable-uvicorn-access-log"],
        *["--h11-max-incomplete-event-size", "1000", "--log-level", "debug"],
    )
    assert (got.engine.max_loras, got.engine.max_model_len, got.engine.lora_dir) == (3, 64, "d")
    assert got.engine.served_model_name == "one"
    assert got.http.served_names == ("one", "two")
    assert got.http.api_keys == ("a", "b")
    assert (got.http.admin_keys, got.http.metrics_keys) == (("c",), ("e",))
    assert got.http.demo
    assert got.http.enable_runtime_lora
    assert got.adapters == (LoraModuleFlag("x", "p"), LoraModuleFlag("y", "q"))
    assert not got.access_log
    assert got.uvicorn == {"h11_max_incomplete_event_size": 1000}
    assert got.log_level == "debug"


def test_flags_of_vllm_s_front_reach_their_places():
    got = options(
        *["--allowed-origins", '["https://x.org"]', "--allowed-methods", '["POST"]'],
        *["--root-path", "/llm", "--disable-fastapi-docs", "--response-role", "bot"],
        *["--default-chat-template-kwargs", '{"enable_thinking": false}', "--uds", "/run/s"],
        *["--return-tokens-as-token-ids", "--enable-force-include-usage", "--enable-log-requests"],
        *["--sse-keep-alive-interval", "3", "--disable-log-stats", "--uvicorn-log-level", "trace"],
        *["--disable-access-log-for-endpoints", "/a,/b", "--shutdown-timeout", "4"],
        *["--ssl-cert-reqs", "2", "--host", "0.0.0.0", "--enable-auto-tool-choice"],
        *["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"],
    )
    http = got.http
    assert http.cors == Cors(("https://x.org",), methods=("POST",))
    assert (http.root_path, http.docs, http.response_role) == ("/llm", False, "bot")
    assert http.default_template_kwargs == {"enable_thinking": False}
    assert (http.auto_call_parser, http.reasoning_parser) == ("hermes", "qwen3")
    assert http.tokens_as_ids
    assert http.force_include_usage
    assert http.log_requests
    assert http.keep_alive_s == 3
    assert (got.uds, got.quiet_paths, got.log_stats) == ("/run/s", ("/a", "/b"), False)
    assert got.uvicorn == {"log_level": "trace", "ssl_cert_reqs": 2}
    assert got.shutdown_timeout == 4
    assert options("--sse-keep-alive-interval", "0").http.keep_alive_s > 1e6
    assert options().http.keep_alive_s > 1e6  # vLLM's load generator takes comments for failures


def test_vllm_s_key_in_the_environment_is_a_key():
    assert options(VLLM_API_KEY="k").http.api_keys == ("k",)
    assert options("--api-key", "a", VLLM_API_KEY="k").http.api_keys == ("a",)


def test_vllm_s_environment_twin_of_runtime_loading():
    assert options(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1").http.enable_runtime_lora
    assert not options(VLLM_ALLOW_RUNTIME_LORA_UPDATING="0").http.enable_runtime_lora


def test_sglang_counts_the_base_as_a_batch_member():
    assert options("--max-loras-per-batch", "8").engine.max_loras == 7
    assert options("--max-loras-per-batch", "8", "--max-loras", "7").engine.max_loras == 7


HOSTS = dict.fromkeys(("127.0.0.1", "127.9.9.9", "::1", "localhost"), True)
HOSTS |= dict.fromkeys(("0.0.0.0", "::", "10.0.0.1", "example.com"), False)


@pytest.mark.parametrize(("host", "safe"), HOSTS.items())
def test_the_network_needs_a_key(capsys, tmp_path, host, safe):
    assert is_loopback(host) == safe
    keys = tmp_path / "keys.yaml"
    keys.write_text("k: {adapters: [a]}")
    keys.chmod(0o600)
    assert options("--host", host, "--api-key", "k").host == host
    assert options("--host", host, "--keys-file", str(keys)).host == host
    assert options("--host", host, "--insecure").host == host
    if safe:
        assert options("--host", host).host == host
    else:
        assert "--api-key" in refused(capsys, "--host", host)
        assert "--api-key" in refused(capsys, "--host", host, "--admin-api-key", "k")


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--max-loras", "0"], "max_loras must be in"),
        (["--enable-auto-tool-choice"], "needs --tool-call-parser"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--lora-modules", "nothing="], "NAME=PATH"),
        (["--keys-file", "/no/such/file"], "No such file"),
        (["--api-key", "a", "a"], "twice"),
        (["--port", "70000"], "a port is in [0, 65535]"),
        (["--sse-keep-alive-interval", "-1"], "must be positive, or 0 for never"),
        (["--root-path", "llm"], "--root-path must be like /llm"),
        (["--allowed-origins", '["*"]', "--allow-credentials"], "by name in --allowed-origins"),
        (["--lora-modules", "a=x", "a=y"], "the name 'a' twice"),
        (["--trust-remote-code"], "never run here"),
    ],
)
def test_mistakes_end_with_status_2_and_their_name(capsys, argv, problem):
    assert problem in refused(capsys, *argv)


def test_no_model(capsys):
    with pytest.raises(SystemExit):
        read_options([], {})
    assert "no model is given" in capsys.readouterr().err
