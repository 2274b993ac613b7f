"""Server start from a command line, and errors that prevent it."""

import argparse
import dataclasses
import importlib
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import httpx
import pytest
from support.cases.bad_adapters import missing_b
from support.cases.tiny_checkpoint import TinyShape, write_adapter, write_model
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.processes.server_process import ROOT, post

import serving
from serving import launch
from serving.api.cluster_config import ClusterConfig
from serving.cli.flag_values import LoraModuleFlag
from serving.cli.flags import build_parser
from serving.http.settings import Cors
from serving.launch import is_loopback, main, read_options

BODY = {"prompt": "x", "max_tokens": 4}


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
OF_NODES = ["--tensor-parallel-size", "2", "--nodes-secret-file", "s"]
NEEDS = {
    "nnodes": OF_NODES,
    "node_rank": [*OF_NODES, "--nnodes", "2"],
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
OF_A_KEY, OF_A_LORA_SERVER = ["--api-key", "k"], ["--instances", "2", "--lora-server", "2"]


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
    assert options("--max-loras-per-batch", "8", "--max-loras", "3").engine.max_loras == 3


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


@pytest.fixture
def fake(monkeypatch, tmp_path, caplog):
    """`serving.Engine` is the fake one; the engine made last is in `made`."""
    root = write_fake_adapters(tmp_path / "root", "sql", "bad-one")
    made: list[FakeEngine] = []

    class Engine(FakeEngine):
        def __init__(self, model: str, adapters: dict[str, str], **fields):
            super().__init__(root)
            made.append(self)
            for name, path in adapters.items():
                self.load_adapter(name, path)

        def load_adapter(self, name: str, path: str, *, pinned: bool = False) -> None:
            self.registry.load(name, path, pinned=pinned)

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

    monkeypatch.setattr(serving, "Engine", Engine, raising=False)
    monkeypatch.setattr(launch.logs, "configure", lambda level, quiet: None)
    (root / "m").mkdir()
    (root / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(root)
    caplog.set_level(logging.INFO)
    before = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, before)


def test_it_serves_until_sigterm_and_then_closes_the_engine(fake, caplog):
    seen = []

    def client() -> None:
        while "Ready: http" not in caplog.text:
            time.sleep(0.01)
        url = caplog.text.split("Ready: ")[1].split()[0]
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            seen.append(answer.status)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    assert main(["m", "--port", "0", "--lora-modules", "x=sql"]) == 0
    thread.join()
    assert seen == [200]
    assert not fake[0].alive
    text = caplog.text
    lines = ["Route: /v1/completions, Methods: POST", "Starting vLLM-compatible server on http://"]
    lines += ["Application startup complete.", "Ready: http://127.0.0.1:", "curl http://127.0.0.1:"]
    places = [text.index(line) for line in lines]
    assert places == sorted(places)
    assert any(line.split()[-6:-3] == ["x", "lora", "4"] for line in text.splitlines())


def test_sigterm_lets_running_requests_finish(fake, caplog):
    answers = []

    def client() -> None:
        while "Ready: http" not in caplog.text:
            time.sleep(0.01)
        url = caplog.text.split("Ready: ")[1].split()[0]
        fake[0].open.clear()
        asking = threading.Thread(
            target=lambda: answers.append(post(f"{url}/v1/completions", BODY))
        )
        asking.start()
        while not fake[0].running:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        while "Ending: 1 requests run" not in caplog.text and asking.is_alive():
            time.sleep(0.01)
        fake[0].open.set()
        asking.join()

    thread = threading.Thread(target=client)
    thread.start()
    assert main(["m", "--port", "0"]) == 0
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert not fake[0].alive


def test_sigterm_ends_a_stream_with_an_error_event_within_the_grace(fake, caplog):
    """Before: after 30 s the connection broke off, and new requests found no listener."""
    told = {}

    def client() -> None:
        while "Ready: http" not in caplog.text:
            time.sleep(0.01)
        url = caplog.text.split("Ready: ")[1].split()[0]
        fake[0].open.clear()
        with (
            httpx.Client(base_url=url, timeout=30) as caller,
            caller.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as stream,
        ):
            os.kill(os.getpid(), signal.SIGTERM)
            while "Ending: 1 requests run" not in caplog.text:
                time.sleep(0.01)
            refused = httpx.post(f"{url}/v1/completions", json=BODY)
            told["new"] = refused.status_code, refused.headers["retry-after"]
            told["ready"] = httpx.get(f"{url}/ready").status_code
            told["live"] = httpx.get(f"{url}/live").status_code
            begun = time.monotonic()
            told["stream"] = "".join(stream.iter_text())
            told["seconds"] = time.monotonic() - begun
        fake[0].open.set()

    thread = threading.Thread(target=client)
    thread.start()
    assert main(["m", "--port", "0", "--shutdown-timeout", "6"]) == 0
    thread.join()
    assert (told["new"], told["ready"], told["live"]) == ((503, "5"), 503, 200)
    last = told["stream"].strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["message"] == "The server is shutting down."
    assert told["seconds"] < 15  # 3 s of its own; the rest is for a busy machine
    assert not fake[0].running


def test_a_bad_adapter_stops_the_start_and_is_named(fake, caplog):
    assert main(["m", "--port", "0", "--lora-modules", "x=sql", "y=bad-one"]) == 1
    assert "Cannot serve m: " in caplog.text
    assert "bad-one/adapter_model.safetensors: lora_B is missing" in caplog.text
    pinned = '{"name": "p", "path": "bad-one", "pinned": true}'
    assert main(["m", "--port", "0", "--lora-modules", pinned]) == 1
    assert not fake[-1].alive


def test_a_bad_model_stops_the_start(monkeypatch, fake, caplog):
    def engine(model: str, adapters: dict[str, str], **fields):
        raise ValueError("config.json is missing")

    monkeypatch.setattr(serving, "Engine", engine)
    assert main(["m", "--port", "0"]) == 1
    assert "Cannot serve m: config.json is missing" in caplog.text


def test_a_taken_port_is_found_before_the_model_is_loaded(fake, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["m", "--port", str(taken.getsockname()[1])]) == 1
    assert "Cannot listen on 127.0.0.1:" in caplog.text
    assert fake == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model with a good adapter and one without its B matrices."""
    folder = tmp_path_factory.mktemp("launch")
    write_model(folder / "tiny", TinyShape())
    for name in ("good", "bad"):
        write_adapter(folder / name, TinyShape(), rank=4, seed=1)
    missing_b(folder / "bad")
    return folder


def command(tiny, *argv: str) -> list[str]:
    small = ["--max-num-seqs", "4", "--max-num-batched-tokens", "8", "--max-loras", "1"]
    return [
        sys.executable,
        "-m",
        "serving.launch",
        str(tiny / "tiny"),
        "--port",
        "0",
        *small,
        *argv,
    ]


def start(tiny, *argv: str) -> subprocess.Popen[str]:
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command(tiny, *argv), cwd=ROOT, env=env, text=True, **both)


def test_a_real_server_prints_a_command_that_works_and_stops_cleanly(tiny):
    lines = []
    with start(tiny, "--lora-modules", f"good={tiny / 'good'}") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if "] curl http://" in line:
                break
        curl = shlex.split(lines[-1].split("] ", 1)[1])
        body = json.loads(curl[curl.index("-d") + 1])
        for model in (body["model"], "good"):
            answer = post(curl[1], body | {"model": model, "max_tokens": 4})
            assert answer["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0, rest
    text = "\n".join(lines)
    assert "lora-jax 0." in text
    assert "loaded in" in text
    assert "Starting vLLM-compatible server on http://127.0.0.1:" in text
    assert "KV cache:" in text
    assert "Compiled" in text
    assert "Application startup complete." in text
    assert "Traceback" not in text + rest
    assert body["messages"][0]["content"] not in rest


@pytest.mark.long
def test_a_real_bad_adapter_ends_with_status_1(tiny):
    with start(tiny, "--lora-modules", f"evil={tiny / 'bad'}") as process:
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith("ERROR")
    assert "'evil'" in last
    assert "lora_B" in last
    assert "Traceback" not in text


def test_a_unix_socket_instead_of_a_port(fake, caplog, tmp_path):
    answers, path = [], str(tmp_path / "socket")

    def client() -> None:
        while "Ready: unix://" not in caplog.text:
            time.sleep(0.01)
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://x") as one:
            answers.append(one.get("/health").status_code)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    assert main(["serve", "m", "--uds", path, "--disable-log-stats"]) == 0
    thread.join()
    assert answers == [200]


def test_keys_that_others_can_read_and_a_missing_one_are_warned_of(fake, monkeypatch, caplog):
    ran = []
    monkeypatch.setattr(launch, "run", ran.append)
    assert main(["m", "--api-key", "k", "--metrics-key=m"]) == 0
    for flag, twin in (("--api-key", "SERVING_API_KEY"), ("--metrics-key", "SERVING_METRICS_KEY")):
        assert f"can read {flag} in the list of processes; better: {twin}" in caplog.text
    assert "No API key" not in caplog.text
    assert main(["m", "--host", "0.0.0.0", "--insecure"]) == 0
    assert "No API key: every client that reaches 0.0.0.0 can use this server." in caplog.text
    assert len(ran) == 2


def test_the_command_is_a_node_a_front_of_functions_or_a_cluster_as_its_flags_say(
    monkeypatch, tmp_path
):
    ran = []
    for place in ("node.serve_node", "functions_front.serve_functions", "front.serve_cluster"):
        module, _, name = place.partition(".")
        told = lambda options, *sock, name=name: ran.append((name, *sock))  # noqa: E731
        monkeypatch.setattr(importlib.import_module(f"serving.cluster.{module}"), name, told)
    (tmp_path / "secret").write_text("s" * 32)
    node = ["m", "--nnodes", "2", "--node-rank", "1", "--tensor-parallel-size", "2"]
    launch.run(read_options([*node, "--nodes-secret-file", str(tmp_path / "secret")], {}))
    assert ran == [("serve_node",)]  # which listens nowhere
    for flags in (["--functions", str(tmp_path)], ["--instances", "2"]):
        launch.run(read_options(["m", "--port", "0", *flags], {}))
    assert [name for name, *_ in ran[1:]] == ["serve_functions", "serve_cluster"]
    assert [sock.fileno() for _, sock in ran[1:]] == [-1, -1]  # closed behind them
