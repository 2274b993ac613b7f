"""An instance over two nodes: killed and hung members, the end, and nodes that do not fit."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.processes.member_loss import START_FOUND_S, MemberLoss
from support.processes.server_process import ROOT, free_port, wait_healthy
from support.waiting import wait_until

BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "logprobs": 1}


@pytest.fixture
def model(tmp_path):
    shape = TinyShape(layers=1, max_positions=64, experts=4)
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    tiny_checkpoint.write_adapter(tmp_path / "a1", shape, 3, seed=1)
    (tmp_path / "secret").write_text("s" * 32)
    return tmp_path


class Nodes:
    """Two nodes on this machine."""

    def __init__(self, folder, stack):
        self.folder, self.port, self.master = folder, free_port(), free_port()
        self.url, self.stack = f"http://127.0.0.1:{self.port}", stack
        self.nodes = [self.start(rank) for rank in (0, 1)]

    def start(self, rank, *more):
        words = f"--tensor-parallel-size 2 --nnodes 2 --node-rank {rank} --port {self.port} "
        words += f"--master-port {self.master} --nodes-secret-file {self.folder / 'secret'} "
        words += "--max-loras 2 --max-lora-rank 4 --max-num-seqs 4 --max-num-batched-tokens 8 "
        words += f"--no-structured-outputs --lora-modules a1={self.folder / 'a1'} "
        words += f"--enable-runtime-lora --lora-dir {self.folder}"
        command = [sys.executable, "-m", "serving.launch", str(self.folder / "model")]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        with self.log(rank).open("a") as out:
            node = subprocess.Popen(
                [*command, *words.split(), *more], cwd=ROOT, env=env, stdout=out, stderr=out
            )
        self.stack.callback(node.wait, 60)
        self.stack.callback(node.terminate)
        return node

    def log(self, rank):
        return self.folder / f"log{rank}"

    def until_they_load(self):
        """Return when the processes of both nodes see each other's devices."""
        wait_until(lambda: all(" devices)." in self.log(n).read_text() for n in (0, 1)), 280)

    def health(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def ask(self, model="a1"):
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(BODY | {"model": model}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            choice = json.load(answer)["choices"][0]
        return choice["text"], choice["logprobs"]

    @contextlib.contextmanager
    def under_load(self):
        """Ask all the time; yield what the requests got, each an answer or a status."""
        over, said = threading.Event(), []

        def crowd():
            while not over.is_set():
                try:
                    said.append(self.ask())
                except urllib.error.HTTPError as error:
                    with error:
                        said.append(error.code)
                    over.wait(0.2)

        threads = [threading.Thread(target=crowd) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield said
        finally:
            over.set()
            for thread in threads:
                thread.join(150)

    def member(self, rank):
        """The process of a node that has its devices."""
        found = []
        for task in Path(f"/proc/{self.nodes[rank].pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    if "serving.cluster.far.member" in Path(f"/proc/{pid}/cmdline").read_text():
                        found.append(pid)
        return max(found)

    def until(self, status):
        """Return when /health gives this status."""
        end = time.monotonic() + 280
        while self.health() != status:
            assert time.monotonic() < end, self.log(0).read_text()[-3000:]
            time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_lost_member_is_found_and_the_answers_stay_the_same(model):
    """Killed and hung ones of either node, under load; then rank 0 ends, and the other with it."""
    with contextlib.ExitStack() as stack:
        began, nodes = time.monotonic(), Nodes(model, stack)
        wait_healthy(nodes.url, nodes.nodes[0], nodes.log(0))
        start_s = time.monotonic() - began
        want = nodes.ask()
        load = {"lora_name": "late", "lora_path": "a1"}
        request = urllib.request.Request(
            f"{nodes.url}/v1/load_lora_adapter",
            json.dumps(load).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()
        with nodes.under_load() as said:
            for rank, number in ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)):
                wait_until(lambda: said and said[-1] == want)
                loss = MemberLoss([nodes.member(rank)], number)
                nodes.until(503)
                loss.is_found()
                wait_until(lambda: said[-1] == 503)
                nodes.until(200)
                loss.is_over(start_s)
                assert nodes.ask() == nodes.ask("late") == want  # loaded again, too
        assert [one for one in said if one not in (want, 503)] == []
        nodes.nodes[0].terminate()
        assert [node.wait(60) for node in nodes.nodes] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_start_that_is_stopped_ends_the_other_node_too(model):
    """It does not wait for another rank 0."""
    with contextlib.ExitStack() as stack:
        nodes = Nodes(model, stack)
        nodes.until_they_load()
        nodes.nodes[0].terminate()
        assert [node.wait(60) for node in nodes.nodes] == [0, 0], nodes.log(1).read_text()[-3000:]
        assert "Rank 0 has ended" in nodes.log(1).read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_start_that_fails_on_rank_0_alone_ends_both_and_names_the_cause(model):
    """Only rank 0 reads adapters; the commands know their names and configs."""
    weights = model / "a1" / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = min(tensors)
    save_file(tensors | {first: np.ascontiguousarray(tensors[first][:, 1:])}, weights)
    with contextlib.ExitStack() as stack:
        nodes = Nodes(model, stack)
        assert [node.wait(280) for node in nodes.nodes] == [1, 0]
        said = nodes.log(0).read_text()
        assert "Instance 0: Cannot serve" in said
        assert re.search(r"Adapter 'a1': adapter_model.safetensors: .*lora_A.* shape", said)
        assert "Instance 0 did not start; its log says why." in said
        assert "Rank 0 has ended" in nodes.log(1).read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_hangs_while_it_starts_is_found(model):
    """All of its processes are stopped."""
    with contextlib.ExitStack() as stack:
        nodes = Nodes(model, stack)
        nodes.until_they_load()
        stack.callback(nodes.nodes[1].send_signal, signal.SIGCONT)
        loss = MemberLoss([nodes.nodes[1].pid, nodes.member(1)], signal.SIGSTOP)
        assert nodes.nodes[0].wait(120) == 1
        loss.is_found(START_FOUND_S)
        assert "Node 1 of instance 0 hangs while it starts." in nodes.log(0).read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_does_not_fit_is_refused_with_what_differs(model):
    with contextlib.ExitStack() as stack:
        nodes = Nodes(model, stack)
        nodes.nodes[1].terminate()
        other = nodes.start(1, "--max-loras", "3")
        assert other.wait(280) == 1
        assert nodes.nodes[0].wait(280) == 1
        for rank in (0, 1):
            assert "--max-loras is '3' on node 1 and '2' on rank 0" in nodes.log(rank).read_text()
