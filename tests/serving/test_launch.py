"""From a command line to a server, and what stops it from starting."""

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

import pytest
from bad_adapters import missing_b
from fake_engine import FakeEngine, write_fake_adapters
from server_process import ROOT, post
from tiny_checkpoint import TinyShape, write_adapter, write_model

import serving
from serving import launch
from serving.flags import LoraModule
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
    assert got.adapters == (LoraModule("x", "p"), LoraModule("y", "q"))
    assert not got.access_log
    assert got.uvicorn == {"h11_max_incomplete_event_size": 1000}
    assert got.log_level == "debug"


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
        (["--dtype", "int8"], "dtype must be one of"),
        (["--lora-modules", "nothing="], "NAME=PATH"),
        (["--keys-file", "/no/such/file"], "No such file"),
        (["--api-key", "a", "a"], "twice"),
        (["--lora-modules", "a=x", "a=y"], "the name 'a' twice"),
        (["--trust-remote-code"], "never run here"),
    ],
)
def test_mistakes_end_with_status_2_and_their_name(capsys, argv, problem):
    assert problem in refused(capsys, *argv)


def test_no_model(capsys):
    with pytest.raises(SystemExit):
        read_options([], {})
    assert "which model?" in capsys.readouterr().err


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
    monkeypatch.setattr(launch.logs, "configure", lambda level: None)
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
        while "Waiting for connections to close" not in caplog.text and asking.is_alive():
            time.sleep(0.01)
        fake[0].open.set()
        asking.join()

    thread = threading.Thread(target=client)
    thread.start()
    assert main(["m", "--port", "0"]) == 0
    thread.join()
    assert answers[0]["usage"]["completion_tokens"] == BODY["max_tokens"]
    assert not fake[0].alive


def test_a_bad_adapter_stops_the_start_and_is_named(fake, caplog):
    assert main(["m", "--port", "0", "--lora-modules", "x=sql", "y=bad-one"]) == 1
    assert "Cannot serve m: " in caplog.text
    assert "bad-one/adapter_model.safetensors: lora_B is missing" in caplog.text
    assert main(["m", "--port", "0", "--lora-modules", "z=nowhere"]) == 1
    assert "'z'" in caplog.text
    pinned = '{"name": "p", "path": "bad-one", "pinned": true}'
    assert main(["m", "--port", "0", "--lora-modules", pinned]) == 1
    assert not fake[-1].alive


def test_a_bad_model_stops_the_start(monkeypatch, fake, caplog):
    def engine(model: str, adapters: dict[str, str], **fields):
        raise ValueError("config.json is missing")

    monkeypatch.setattr(serving, "Engine", engine)
    assert main(["nowhere", "--port", "0"]) == 1
    assert "Cannot serve nowhere: config.json is missing" in caplog.text


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
    assert body["prompt"] not in rest


def test_a_real_bad_adapter_ends_with_status_1(tiny):
    with start(tiny, "--lora-modules", f"evil={tiny / 'bad'}") as process:
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    last = text.strip().splitlines()[-1]
    assert last.startswith("ERROR")
    assert "'evil'" in last
    assert "lora_B" in last
    assert "Traceback" not in text
