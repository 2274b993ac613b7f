"""`--functions DIR`: answers of one engine, to zero and back, deaths apart, bad folders by name."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.processes.server_process import ROOT, serve_process

from serving import Engine, Sampling
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster.functions_front import serve_functions
from serving.http.settings import HttpSettings

MODEL = ROOT / "assets" / "tiny-moe"
SIZES = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8, "max_lora_rank": 16}
PROMPT = "The court"


@pytest.mark.parametrize("served", [(), ("law",)])
def test_a_name_that_stands_twice_ends_the_start(tmp_path, served):
    name = served[0] if served else "base"
    (tmp_path / name).mkdir()
    (tmp_path / name / "adapter_config.json").write_text("{}")
    engine = EngineConfig(model=str(MODEL), served_model_name=name)
    functions = FunctionsConfig(functions=str(tmp_path))
    http = HttpSettings(served_names=served)
    with socket.socket() as sock, pytest.raises(StartError, match=f"'{name}' stands twice"):
        serve_functions(Options(engine, http, functions=functions), sock)


EVENT = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "test", "ce-type": "completion"}


def answer(url: str, model: str) -> httpx.Response:
    """Return what a request gets that comes as Knative sends events: binary CloudEvents."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    return httpx.post(f"{url}/v1/completions", json=body, headers=EVENT, timeout=300)


def tokens(url: str, model: str) -> tuple[str, list[float]]:
    choice = answer(url, model).json()["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def children(pid: int) -> list[int]:
    """Return the processes below a process."""
    task = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in task.read_text().split()]
    return found + [below for child in found for below in children(child)]


def waited(condition, seconds: float = 240):
    """Return once the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["process", "server"])
def test_functions_answer_as_one_engine_does_to_zero_and_back(tmp_path, isolation):
    """Also after kill -9 of a function, and beside an adapter of another base."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    for name in ("law", "summary", "foreign"):
        shutil.copytree(MODEL / "adapters" / name.replace("foreign", "law"), folder / name)
    weights = folder / "foreign" / "adapter_model.safetensors"
    narrow = {k: np.ascontiguousarray(v[:, :-1]) for k, v in load_file(weights).items()}
    save_file(narrow, weights)
    adapters = {name: folder / name for name in ("law", "summary")}
    fixed = SIZES | {"structured_outputs": False, "max_esft_adapters": 0}
    with Engine(MODEL, adapters, **fixed) as engine:
        sampling = Sampling(max_tokens=12, temperature=0, logprobs=1)
        outputs = {n: engine.generate(PROMPT, n, sampling)[0].outputs[0] for n in adapters}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    flags += ["--no-structured-outputs", "--functions-keep-alive-s", "0.5"]
    flags += ["--functions-isolation", isolation]
    log = tmp_path / "log"
    args = str(MODEL), "--functions", str(folder), *flags
    with serve_process(*args, log=log) as (process, port):
        url = f"http://127.0.0.1:{port}"
        _check(url, outputs)
        refused = answer(url, "foreign")
        assert refused.status_code == 400
        assert "'foreign' cannot start" in refused.json()["error"]["message"]
        assert str(folder) not in refused.text
        # To zero: zygote alone is left. And back.
        waited(lambda: len(children(process.pid)) == 1)
        _check(url, outputs)
        for pid in children(process.pid)[1:]:
            os.kill(pid, signal.SIGKILL)
        _check(url, outputs)
        left = children(process.pid)
    waited(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    assert process.returncode == 0, log.read_text()


def _check(url: str, outputs) -> None:
    for name, output in outputs.items():
        text, logprobs = tokens(url, name)
        assert text == output.text
        assert logprobs == [pytest.approx(entry.logprob, abs=1e-6) for entry in output.logprobs]


@pytest.mark.long
def test_two_agents_behind_one_front_and_one_is_killed(tmp_path):
    """Its functions are answered by the other one, and it comes back."""
    adapters = {name: MODEL / "adapters" / name for name in ("law", "summary")}
    fixed = SIZES | {"structured_outputs": False, "max_esft_adapters": 0}
    with Engine(MODEL, adapters, **fixed) as engine:
        sampling = Sampling(max_tokens=12, temperature=0, logprobs=1)
        outputs = {n: engine.generate(PROMPT, n, sampling)[0].outputs[0] for n in adapters}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    flags += ["--no-structured-outputs", "--instances", "2"]
    log = tmp_path / "log"
    args = str(MODEL), "--functions", str(MODEL / "adapters"), *flags
    with serve_process(*args, log=log) as (process, port):
        url = f"http://127.0.0.1:{port}"
        _check(url, outputs)
        assert httpx.get(f"{url}/health").json()["instances"] == ["up", "up"]
        text = httpx.get(f"{url}/metrics").text
        assert "lora_jax:function_state{" in text
        engines = set(re.findall(r'engine="([^"]*)"', text))
        assert any(name.endswith("/law") for name in engines)
        for number in (0, 1):
            instance = roles(process.pid)[number]
            below = children(instance)
            os.kill(instance, signal.SIGKILL)
            _check(url, outputs)  # by the other
            waited(lambda below=below: not any(Path(f"/proc/{p}").exists() for p in below))
            waited(lambda: httpx.get(f"{url}/health").json()["instances"] == ["up", "up"])
            _check(url, outputs)
        left = children(process.pid)
    waited(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


def roles(pid: int) -> list[int]:
    """Return the instances' processes of a server: those with children of their own."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    direct = [int(c) for t in threads for c in (t / "children").read_text().split()]
    return sorted(child for child in direct if children(child))


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-modules", "a=b"], "--functions does not work with --lora-modules"),
        (["--lora-server", "1"], "--functions does not work with --lora-server or --nnodes"),
    ],
)
def test_what_does_not_go_with_functions_ends_the_start(tmp_path, flags, message):
    command = [sys.executable, "-m", "serving.launch", str(MODEL), "--functions", str(tmp_path)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
