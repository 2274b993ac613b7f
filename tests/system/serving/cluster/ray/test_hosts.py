"""Two Ray nodes on this machine: one command serves on both, and outlives the loss of a member."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.doubles import nvshmem_double
from support.processes.compiler import compile_fast
from support.processes.member_loss import MemberLoss
from support.processes.server_process import ROOT, free_port, post, wait_healthy

pytest.importorskip("ray")
NODES = ROOT / "tests" / "support" / "processes" / "ray_nodes.py"
SIZES = "--max-loras 2 --max-lora-rank 4 --max-num-seqs 4 --max-num-batched-tokens 8"


class RayNodes:
    """A cluster of this test's, with a token of its own."""

    def __init__(self, folder, stack, count=2):
        (folder / "token").write_text("5" * 64)
        (folder / "token").chmod(0o600)
        self.env = {name: value for name, value in os.environ.items() if "RAY_" not in name}
        self.env |= {"JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
        compile_fast(self.env)  # each member compiles every program, and again after a loss
        self.open_env = self.env | {"RAY_AUTH_MODE": "disabled"}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        with (folder / "nodes.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(NODES), str(count)],
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        stack.callback(self.process.wait, 60)
        stack.callback(self.process.stdout.close)
        stack.callback(self.process.stdin.close)
        self.address = self.process.stdout.readline().strip()
        assert self.address, (folder / "nodes.log").read_text()[-3000:]
        self.head = int(self.process.stdout.readline())

    def add(self, env):
        """Add a node with these variables."""
        self.process.stdin.write(json.dumps(env) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


class Served:
    """The server of one command on a cluster."""

    def __init__(self, nodes, folder, stack, words, name="server"):
        self.port, self.log = free_port(), folder / f"{name}.log"
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "serving.launch", str(folder / "model"), "--port"]
        command += [str(self.port), "--distributed-executor-backend", "ray", *SIZES.split()]
        command += ["--no-structured-outputs", *words.split()]
        env = nodes.env | {"RAY_ADDRESS": nodes.address}
        self._began, self.start_s = time.monotonic(), 0.0
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
        stack.callback(self.end)

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def wait(self):
        wait_healthy(self.url, self.process, self.log)
        self.start_s = time.monotonic() - self._began

    def ask(self, model):
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0}
        choice = post(f"{self.url}/v1/completions", body | {"logprobs": 1})["choices"][0]
        return choice["text"], choice["logprobs"]

    def status(self, path="/health", body=None):
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def until(self, status, limit_s=500.0):
        """Return when /health gives this status."""
        end = time.monotonic() + limit_s
        while self.status() != status:
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.02)


def members(cluster):
    """Return the roles' processes of this cluster, by role."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
            if "serving.cluster.far.member" in command:
                own = cluster.env["RAY_AUTH_TOKEN_PATH"] in (entry / "environ").read_text()
                if own and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[(entry / "comm").read_text().strip()] = int(entry.name)
    return found


@pytest.fixture
def model(tmp_path):
    shape = TinyShape(layers=1, max_positions=64, experts=4)
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    for name, rank in (("a1", 3), ("a2", 2)):
        tiny_checkpoint.write_adapter(tmp_path / "adapters" / name, shape, rank, seed=rank)
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_one_command_serves_on_two_hosts_and_outlives_a_member(model):
    """An instance over both: a killed member, a hung one, and a node without the token."""
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(model, stack)
        stranger = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus", "1"]
        stranger = subprocess.Popen(
            [*stranger, "--address", nodes.address],
            env=nodes.open_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stack.callback(stranger.communicate)
        words = f"--tensor-parallel-size 2 --nnodes 2 --lora-modules a1={model / 'adapters' / 'a1'}"
        words += f" --enable-runtime-lora --lora-dir {model / 'adapters'}"
        server = Served(nodes, model, stack, words)
        server.wait()
        load = {"lora_name": "a2", "lora_path": "a2"}
        assert server.status("/v1/load_lora_adapter", load) == 200
        want = {name: server.ask(name) for name in ("model", "a1", "a2")}
        first = members(nodes)
        assert sorted(first) == ["instance-0", "node-1"]
        for pid in first.values():  # requests run where no Ray is
            assert "_raylet" not in Path(f"/proc/{pid}/maps").read_text()

        killed = MemberLoss([first["node-1"]], signal.SIGKILL)
        server.until(503)
        killed.is_found()
        assert server.status("/v1/completions", {"model": "a1", "prompt": [5]}) == 503
        server.until(200)
        killed.is_over(server.start_s)
        assert {name: server.ask(name) for name in want} == want
        second = members(nodes)
        assert not set(first.values()) & set(second.values())  # all of them ended together

        hung = MemberLoss([second["node-1"]], signal.SIGSTOP)
        server.until(503)
        hung.is_found()
        server.process.terminate()
        assert server.process.wait(60) == 0
        until_gone = time.monotonic() + 20
        while members(nodes):
            assert time.monotonic() < until_gone, members(nodes)
            time.sleep(0.1)
        said = stranger.communicate(timeout=120)[0]
        assert stranger.returncode != 0
        assert "InvalidAuthToken" in said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_instances_share_a_lora_server_over_tcp(model):
    """Four roles on four nodes; the front and the answers outlive each kind of them."""
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(model, stack, 4)
        words = f"--data-parallel-size 2 --lora-server 2 --lora-dir {model / 'adapters'}"
        server = Served(nodes, model, stack, words)
        server.wait()
        want = server.ask("model:a1")
        first = members(nodes)
        roles = ["instance-0", "instance-1", "lora-server-0", "lora-server-1"]
        assert sorted(first) == roles
        for role, number in (("instance-0", signal.SIGKILL), ("lora-server-1", signal.SIGSTOP)):
            os.kill(members(nodes)[role], number)
            assert server.status() == 200  # the others answer
            until(lambda role=role: members(nodes).get(role, first[role]) != first[role])
            until(lambda: answers(server, "model:a1") == want)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_world_of_nvshmem_over_nodes_restarts_as_a_whole(model, monkeypatch):
    """The emulated library joins the roles of four nodes; a killed rank ends all of them."""
    nvshmem_double.plugin(model / "plugin")
    paths = [model / "plugin", ROOT / "tests", ROOT / "src", ROOT]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(model, stack, 4)
        words = f"--data-parallel-size 2 --lora-server 2 --lora-dir {model / 'adapters'} "
        words += "--lora-server-transport nvshmem --lora-server-wait-s 30"
        server = Served(nodes, model, stack, words)
        server.wait()
        want = server.ask("model:a1")
        first = members(nodes)
        assert sorted(first) == ["instance-0", "instance-1", "lora-server-0", "lora-server-1"]
        os.kill(first["lora-server-1"], signal.SIGKILL)
        server.until(503)
        server.until(200)
        until(lambda: answers(server, "model:a1") == want)
        assert not set(first.values()) & set(members(nodes).values())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_host_that_hangs_is_found_and_another_one_takes_its_part(model):
    """All of a node is stopped: raylet, actor and role. A third node is free."""
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(model, stack, 3)
        words = f"--tensor-parallel-size 2 --nnodes 2 --lora-modules a1={model / 'adapters' / 'a1'}"
        server = Served(nodes, model, stack, words)
        server.wait()
        want = server.ask("a1")
        lines = [(pid, parent(pid), parent(parent(pid))) for pid in members(nodes).values()]
        hung = next(line for line in lines if line[2] != nodes.head)
        stack.callback(resume, hung)
        loss = MemberLoss(hung, signal.SIGSTOP)
        server.until(503)
        loss.is_found()
        server.until(200)
        loss.is_over(server.start_s)
        assert server.ask("a1") == want


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def resume(pids):
    """Let stopped processes go on, so that they can end."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_does_not_fit_is_refused_with_what_to_change(model):
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(model, stack, 1)
        taken = free_port()
        other = model / "other"
        (other / "lora_jax-9.9.dist-info").mkdir(parents=True)
        text = "Metadata-Version: 2.1\nName: lora-jax\nVersion: 9.9\n"
        (other / "lora_jax-9.9.dist-info" / "METADATA").write_text(text)
        cases = [
            ("--tensor-parallel-size 2 --nnodes 2", nodes.env, "no room for instance 0"),
            ("--data-parallel-size 3", nodes.env, "Lower --tensor-parallel-size"),
            ("", nodes.open_env, "Whoever reaches a Ray cluster without tokens runs code"),
            ("", nodes.env | {"RAY_ADDRESS": f"127.0.0.1:{taken}"}, "Cannot join the Ray cluster"),
        ]
        for number, (words, env, message) in enumerate(cases):
            one = RayEnv(env, nodes.address)
            server = Served(one, model, stack, words, f"refused-{number}")
            assert server.process.wait(120) == 1
            assert message in server.log.read_text()
        nodes.add({"PYTHONPATH": str(other)})
        words = "--tensor-parallel-size 2 --nnodes 2"
        server = Served(nodes, model, stack, words, "version")
        assert server.process.wait(120) == 1
        said = server.log.read_text()
        assert "does not fit: version of lora-jax is '9.9' there" in said


class RayEnv:
    """A cluster as a command with other variables sees it."""

    def __init__(self, env, address):
        self.env, self.address = env, env.get("RAY_ADDRESS", address)


def answers(server, model):
    """Return an answer, None for an error."""
    try:
        return server.ask(model)
    except AssertionError:
        return None


def until(condition, limit_s=500.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_functions_on_two_hosts_outlive_the_loss_of_an_agent(model):
    """An agent per host; a killed one's functions are answered by the other at once."""
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(model, stack)
        server = Served(nodes, model, stack, f"--instances 2 --functions {model / 'adapters'}")
        server.wait()
        want = {name: server.ask(name) for name in ("model", "a1", "a2")}
        assert want["a1"] != want["a2"]
        found = members(nodes)
        assert sorted(found) == ["instance-0", "instance-1"]
        os.kill(found["instance-0"], signal.SIGKILL)
        assert {name: server.ask(name) for name in want} == want
        server.until(200)
        assert {name: server.ask(name) for name in want} == want


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_last_instance_has_an_adapter_merged_and_the_other_the_rest(tmp_path):
    """Its answers are near those of rank rows, and have other bits."""
    shape = TinyShape(layers=1, max_positions=64)  # dense maps, which merged weights stand for
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    for seed, name in enumerate(("a1", "a2", "a2-again")):
        tiny_checkpoint.write_adapter(tmp_path / name, shape, 3, seed=min(seed, 1))
    with contextlib.ExitStack() as stack:
        nodes = RayNodes(tmp_path, stack)
        modules = " ".join(f"{name}={tmp_path / name}" for name in ("a1", "a2", "a2-again"))
        words = f"--data-parallel-size 2 --merge-adapter a2 --lora-modules {modules}"
        server = Served(nodes, tmp_path, stack, words)
        server.wait()
        assert sorted(members(nodes)) == ["instance-0", "instance-1"]
        (text, merged), (same, rows) = server.ask("a2"), server.ask("a2-again")
        assert text == same
        assert merged["token_logprobs"] != rows["token_logprobs"]
        assert merged["token_logprobs"] == pytest.approx(rows["token_logprobs"], abs=1e-3)
        assert server.ask("a1") != server.ask("model")
