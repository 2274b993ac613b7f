"""`--functions DIR`: answers of one engine, to zero and back, deaths apart, bad folders by name."""

import json
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
from support.doubles.functions_double import FunctionsDouble
from support.processes.served_here import served_here
from support.processes.server_process import ROOT, serve_process

from serving import Engine, Sampling
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster import functions_front
from serving.cluster.functions_front import serve_functions
from serving.http.settings import HttpSettings
from serving.launch import read_options

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


class AgentDouble(FunctionsDouble):
    """Functions that are threads, and what the command has asked for."""

    why = None

    def __init__(self, model, **given):
        super().__init__()
        if self.why is not None:
            raise self.why
        self.model, self.given = model, given
        self.had_budgets = os.path.isdir(given["http"]["budgets_folder"])

    def __enter__(self):
        made.append(self)
        return self

    def __exit__(self, *error):
        self.close()


made: list[AgentDouble] = []


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return the options of a command over two adapter folders; its agent is a double."""
    made.clear()
    monkeypatch.setattr(functions_front, "Agent", AgentDouble)
    for name in ("law", "summary"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")

    def read(*flags):
        return read_options([str(MODEL), "--functions", str(tmp_path / "adapters"), *flags], {})

    return read


def ask_function(client, name, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client.post("/v1/completions", json={"model": name, "prompt": PROMPT}, headers=headers)


def test_the_command_serves_the_folders_functions(command, caplog):
    caplog.set_level("INFO", "serving")
    flags = ["--functions-keep-alive-s", "7", "--functions-isolation", "server", "--dtype"]
    flags += ["float32", "--max-num-seqs", "3", "--max-loras", "5", "--served-model-name", "base"]

    def ask(client):
        texts = [ask_function(client, name).text for name in ("law", "base", "law")]
        assert client.get("/health").json()["functions"] == {"base": "running", "law": "running"}
        assert ask_function(client, "other").status_code == 404
        assert 'function="law",status="2xx"} 2.0' in client.get("/metrics").text
        cards = client.get("/v1/models").json()["data"]
        said = [card.get("quantization") for card in cards]
        assert said == [made[0].quantization, None, None]
        return texts, [card["id"] for card in cards]

    texts, names = served_here(serve_functions, command(*flags), ask)
    assert texts == ["law", "base", "law"]
    assert names == ["base", "law", "summary"]
    assert "Functions: law, summary (2)." in caplog.text
    assert "Quantised weights: 4.0 M in int4 (gptq), 4.50 bits each" in caplog.text
    assert "serves base. Try:" in caplog.text
    (agent,) = made
    given = agent.given
    assert (given["keep_alive_s"], given["isolation"], given["dtype"]) == (7.0, "server", "float32")
    assert given["max_num_seqs"] == 3
    assert given["structured_outputs"]  # an agent's own default is without
    assert "max_loras" not in given  # a function has one adapter
    assert "max_num_batched_tokens" not in given  # not on the command line
    assert given["http"]["settings"]["served_names"] == ("base",)
    assert agent.had_budgets
    assert not os.path.exists(given["http"]["budgets_folder"])
    assert {function.state for function in agent.functions.values()} == {"closed"}


def test_keys_are_checked_in_front_and_what_is_refused_is_written_down(command, tmp_path):
    keys, audit, key = tmp_path / "keys", tmp_path / "audit", "the-key-of-the-lawyer"
    keys.write_text(json.dumps({key: {"id": "lawyer", "adapters": ["law"]}}))
    keys.chmod(0o600)
    options = command("--keys-file", str(keys), "--audit-log", str(audit))

    def ask(client):
        assert ask_function(client, "law", key).text == "law"
        return [
            ask_function(client, name, given).status_code
            for name, given in (("law", None), ("law", "wrong"), ("summary", key))
        ]

    assert served_here(serve_functions, options, ask) == [401, 401, 404]
    actions = [json.loads(line)["status"] for line in audit.read_text().splitlines()]
    assert actions.count(401) == 2
    assert "the-key" not in audit.read_text()


def test_a_base_that_cannot_be_shared_ends_the_start(command, monkeypatch):
    monkeypatch.setattr(AgentDouble, "why", ValueError("there is no config.json"))
    with socket.socket() as sock, pytest.raises(StartError, match=r"tiny-moe: there is no config"):
        serve_functions(command(), sock)


def test_an_audit_log_that_cannot_be_written_ends_the_start(command, tmp_path):
    options = command("--audit-log", str(tmp_path / "none" / "audit"))
    with socket.socket() as sock, pytest.raises(StartError, match="--audit-log: No such file"):
        serve_functions(options, sock)
    assert {function.state for function in made[0].functions.values()} == {"closed"}


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


@pytest.mark.long
@pytest.mark.parametrize("isolation", ["process", "server"])
def test_functions_answer_in_a_schema_and_inherit_no_key(tmp_path, isolation, monkeypatch):
    """The process that tries grammars is started in the jail, where no other program is."""
    monkeypatch.setenv("SERVING_API_KEY", "a-secret-key")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    args = str(MODEL), "--functions", str(MODEL / "adapters"), "--functions-isolation", isolation
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    body = {"model": "law", "max_tokens": 40, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "a"}]
    body["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema},
    }
    log = tmp_path / "log"
    with serve_process(*args, *flags, log=log) as (process, port):
        headers = EVENT | {"Authorization": "Bearer a-secret-key"}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        response = httpx.post(url, json=body, headers=headers, timeout=300)
        assert response.status_code == 200, response.text
        assert list(json.loads(response.json()["choices"][0]["message"]["content"])) == ["a"]
        pids = children(process.pid)
        assert len(pids) >= 3  # zygote, function, process that tries grammars
        for pid in pids:
            assert b"a-secret-key" not in Path(f"/proc/{pid}/environ").read_bytes()


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
