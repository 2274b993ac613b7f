"""Server start from a command line, and errors that prevent it."""

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request

import httpx
import pytest
from support.cases.bad_adapters import missing_b
from support.cases.tiny_checkpoint import TinyShape, write_adapter, write_model
from support.doubles.fake_engine import FakeEngine, write_fake_adapters
from support.processes.certificates import make_certificate
from support.processes.server_process import ROOT, post

import serving
from serving import launch
from serving.http.wire.drain import Drain
from serving.launch import main

BODY = {"prompt": "x", "max_tokens": 4}


@pytest.fixture
def fake(monkeypatch, tmp_path, caplog):
    """`serving.Engine` is the fake one; the engine made last is in `made`."""
    root = write_fake_adapters(tmp_path / "root", "sql", "bad-one")
    made: list[FakeEngine] = []

    class Engine(FakeEngine):
        def __init__(self, model: str, adapters: dict[str, str], *, pinned=(), **fields):
            super().__init__(root)
            made.append(self)
            for name, path in adapters.items():
                self.registry.load(name, path, pinned=name in pinned)

        def __enter__(self):
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

    monkeypatch.setattr(serving, "Engine", Engine, raising=False)
    # A fake engine's model has no tokenizer, its adapters no weights.
    monkeypatch.setattr(launch, "check_start_files", lambda options: None)
    monkeypatch.setattr(launch.logs, "configure", lambda level, quiet: None)
    (root / "m").mkdir()
    (root / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(root)
    caplog.set_level(logging.INFO)
    before, interval = signal.getsignal(signal.SIGTERM), sys.getswitchinterval()
    yield made
    signal.signal(signal.SIGTERM, before)
    sys.setswitchinterval(interval)


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


def test_sigterm_ends_a_stream_with_an_error_event_within_the_grace(fake, caplog, monkeypatch):
    """Before: after 30 s the connection broke off, and new requests found no listener."""
    told, asked, finish = {}, threading.Event(), Drain.finish

    async def finish_when_asked(drain, seconds):
        """The time of the streams is over when the test has asked all else: machines are busy."""
        told["streams_s"], drain.is_draining = seconds, True
        await asyncio.to_thread(asked.wait, 60)
        await finish(drain, 0.05)

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
            while "Ending: 1 requests run, at most 6 s." not in caplog.text:
                time.sleep(0.01)
            refused = caller.post("/v1/completions", json=BODY)
            told["new"] = refused.status_code, refused.headers["retry-after"]
            told["ready"] = caller.get("/ready").status_code
            told["live"] = caller.get("/live").status_code
            asked.set()
            told["stream"] = "".join(stream.iter_text())
        fake[0].open.set()

    monkeypatch.setattr(Drain, "finish", finish_when_asked)
    thread = threading.Thread(target=client)
    thread.start()
    assert main(["m", "--port", "0", "--shutdown-timeout", "6"]) == 0
    thread.join()
    assert (told["new"], told["ready"], told["live"]) == ((503, "5"), 503, 200)
    last = told["stream"].strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["message"] == "The server is shutting down."
    assert told["streams_s"] == 3  # the rest is for the end of what runs
    assert not fake[0].running


def test_a_bad_adapter_stops_the_start_and_is_named(fake, caplog, monkeypatch):
    assert main(["m", "--port", "0", "--lora-modules", "x=sql", "y=bad-one"]) == 1
    assert "Cannot serve m: " in caplog.text
    assert "bad-one/adapter_model.safetensors: lora_B is missing" in caplog.text


def test_a_bad_model_stops_the_start(monkeypatch, fake, caplog):
    def engine(model: str, adapters: dict[str, str], **fields):
        raise ValueError("config.json is missing")

    monkeypatch.setattr(serving, "Engine", engine)
    assert main(["m", "--port", "0"]) == 1
    assert "Cannot serve m: config.json is missing" in caplog.text


def test_ctrl_c_during_the_start_is_a_line_and_no_traceback(monkeypatch, fake, caplog):
    def engine(*args: object, **fields: object):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "Engine", engine, raising=False)
    assert main(["m", "--port", "0"]) == launch.INTERRUPTED == 130
    assert caplog.messages[-1].startswith("Interrupted: the server ends")


INTERRUPTED_BY_COMMAND = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import serving
def engine(*args, **fields):
    ThreadPoolExecutor(1).submit(time.sleep, 300)
    raise KeyboardInterrupt
serving.Engine = engine
sys.argv = ["lora-jax", "serve", "assets/tiny-moe", "--port", "0"]
from serving.launch import {function}
sys.exit({function}())
"""


def test_the_installed_command_ends_at_ctrl_c_though_a_program_is_compiled():
    """Python's own exit waits for the threads of pools."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    code = INTERRUPTED_BY_COMMAND.format(function=scripts["lora-jax"].partition(":")[2])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGINT


def test_a_taken_port_is_found_before_the_model_is_loaded(fake, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["m", "--port", str(taken.getsockname()[1])]) == 1
    assert "Cannot listen on 127.0.0.1:" in caplog.text
    assert "Address already in use. --port chooses another one, 0 a free one." in caplog.text
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
    small += ["--no-structured-outputs"]  # one program
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
        text, _ = process.communicate(timeout=60)
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


def test_tls_is_spoken_with_the_certificate_of_the_flags(fake, caplog, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make_certificate(certificate, key)
    answers: list[int] = []

    def client() -> None:
        try:
            while "Ready: https://127.0.0.1:" not in caplog.text:
                time.sleep(0.01)
            url = caplog.text.split("Ready: ")[1].split()[0]
            trusted = ssl.create_default_context(cafile=certificate)
            with urllib.request.urlopen(f"{url}/health", context=trusted) as answer:
                answers.append(answer.status)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=client)
    thread.start()
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--port", "0"]
    assert main(["m", *flags]) == 0
    thread.join()
    assert answers == [200]


def test_keys_that_others_can_read_and_a_missing_one_are_warned_of(fake, monkeypatch, caplog):
    ran = []
    monkeypatch.setattr(launch, "run", ran.append)
    assert main(["m", "--api-key", "k", "--metrics-key=m"]) == 0
    for flag, twin in (("--api-key", "SERVING_API_KEY"), ("--metrics-key", "SERVING_METRICS_KEY")):
        assert f"can read {flag} in the list of processes; better: {twin}" in caplog.text
    assert "No API key" not in caplog.text
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert main(["m", "--host", "0.0.0.0", "--insecure"]) == 0
    assert "no effect here. VLLM_LOGGING_LEVEL: use --log-level." in caplog.text
    assert "No API key: every client that reaches 0.0.0.0 can use this server." in caplog.text
    assert len(ran) == 2
