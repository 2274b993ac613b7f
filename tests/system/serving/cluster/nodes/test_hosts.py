"""Two nodes, each with an instance and a rank of their LoRA Server: one engine's answers."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import lora_server_cases as cases
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.doubles import nvshmem_double
from support.processes.server_process import ROOT, free_port, post, wait_healthy
from support.waiting import wait_until

from serving import Engine, Sampling

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = 6
MODELS = ["a0", None, "a1", "a2"]
PROMPTS = cases.prompts_of(len(MODELS))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("nodes"))


@pytest.fixture(scope="module")
def coupled(files):
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with Engine(*files, **cases.ENGINE) as engine:
        return [o.outputs[0].text for o in engine.generate(PROMPTS, MODELS, greedy)]


class Nodes:
    """Two nodes on this machine, which find the emulated NVSHMEM."""

    def __init__(self, files, folder, stack, *flags, ranks=2):
        self.folder, self.stack = folder, stack
        self.port, master = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "secret").write_text("s" * 32)
        nvshmem_double.plugin(folder / "plugin")
        paths = [folder / "plugin", ROOT / "tests", ROOT / "src", ROOT]
        self.env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        model, adapters = files
        self.command = [sys.executable, "-m", "serving.launch", model, *cases.engine_flags()]
        self.command += ["--instances", "2"]
        if ranks:
            self.command += ["--lora-server", str(ranks), "--lora-server-wait-s", "30"]
        self.command += ["--nnodes", "2", "--master-port", str(master), "--port", str(self.port)]
        self.command += ["--nodes-secret-file", str(folder / "secret"), *flags]
        self.command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        self.nodes = [self.start(rank) for rank in (0, 1)]
        wait_healthy(self.url, self.nodes[0], self.log(0))

    def log(self, rank):
        return self.folder / f"log{rank}"

    def start(self, rank):
        with self.log(rank).open("a") as out:
            command = [*self.command, "--node-rank", str(rank)]
            node = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=out, stderr=out)
        self.stack.callback(node.wait, 60)
        self.stack.callback(node.kill)
        return node

    def roles(self, rank):
        """Return the roles' processes of a node, by name."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                is_role = "serving.cluster.far.member" in (entry / "cmdline").read_text()
                if is_role and parent == self.nodes[rank].pid:
                    found[(entry / "comm").read_text().strip()] = int(entry.name)
        return found

    def answers(self):
        def ask(name, prompt):
            body = {"model": name or "model", "prompt": prompt, "temperature": 0}
            body |= {"max_tokens": TOKENS, "ignore_eos": True}
            return post(f"{self.url}/v1/completions", body)["choices"][0]["text"]

        return [ask(*one) for one in zip(MODELS, PROMPTS, strict=True)]

    def answers_or_none(self):
        """Return the answers, None while one is refused for now."""
        try:
            return self.answers()
        except OSError:
            return None
        except AssertionError as error:
            if str(error).startswith("503"):
                return None
            raise


def test_a_lost_node_comes_back_and_the_answers_stay_the_same(files, coupled, tmp_path):
    with contextlib.ExitStack() as stack:
        nodes = Nodes(files, tmp_path, stack)
        assert nodes.answers() == coupled
        assert set(nodes.roles(0)) == {"instance-0", "lora-server-0"}
        lost = nodes.roles(1)
        assert set(lost) == {"instance-1", "lora-server-1"}
        nodes.nodes[1].send_signal(signal.SIGKILL)
        nodes.nodes[1].wait(60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in lost.values()))
        wait_until(lambda: "Node 1 is lost" in nodes.log(0).read_text())
        nodes.nodes[1] = nodes.start(1)
        wait_until(lambda: nodes.answers_or_none() == coupled, 400, 0.2)
        wait_until(lambda: set(nodes.roles(1)) == set(lost), 400, 0.2)
        nodes.nodes[0].terminate()
        assert [node.wait(60) for node in nodes.nodes] == [0, 0], nodes.log(0).read_text()[-3000:]


@pytest.mark.parametrize(
    "flags",
    [
        ("--lora-server-transport", "nvshmem", "--lora-attention", "remote"),
        ("--tensor-parallel-size", "2", "--placement", "ep1-pp2"),
    ],
    ids=["nvshmem", "several devices"],
)
def test_other_transports_and_instances_answer_so_too(files, coupled, tmp_path, flags):
    with contextlib.ExitStack() as stack:
        nodes = Nodes(files, tmp_path, stack, *flags)
        assert nodes.answers() == coupled
        assert set(nodes.roles(1)) == {"instance-1", "lora-server-1"}
        nodes.nodes[0].terminate()
        assert [node.wait(60) for node in nodes.nodes] == [0, 0], nodes.log(0).read_text()[-3000:]


def test_the_last_instance_has_an_adapter_merged_and_the_other_the_rest(tmp_path):
    """Each of them has the bits of an engine alone."""
    shape = TinyShape(max_positions=96)  # dense maps, which merged weights can stand for
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    adapters = {name: str(tmp_path / name) for name in ("a0", "a1")}
    for seed, folder in enumerate(adapters.values()):
        tiny_checkpoint.write_adapter(Path(folder), shape, 3, seed)
    files = str(tmp_path / "model"), adapters
    want, plain = {}, scores(files, ["a0", None, "a1"])
    want |= {name: plain[name] for name in ("a0", None)}
    want |= scores(files, ["a1"], merge_adapter="a1")
    assert want["a1"] != plain["a1"]
    with contextlib.ExitStack() as stack:
        nodes = Nodes(files, tmp_path, stack, "--merge-adapter", "a1", ranks=0)
        assert set(nodes.roles(0)) == {"instance-0"}
        assert set(nodes.roles(1)) == {"instance-1"}
        for name in (None, "a0", "a1", "a0", None):
            body = {"model": name or "model", "prompt": PROMPTS[0], "max_tokens": TOKENS}
            body |= {"temperature": 0, "ignore_eos": True, "logprobs": 1}
            choice = post(f"{nodes.url}/v1/completions", body)["choices"][0]
            assert choice["logprobs"]["token_logprobs"] == want[name], name


def scores(files, names, **fields):
    """Return the log-probabilities of one engine's answers to one prompt, by adapter."""
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=1)
    with Engine(*files, **cases.ENGINE, **fields) as engine:
        outputs = engine.generate([PROMPTS[0]] * len(names), names, greedy)
    found = [[place.logprob for place in output.outputs[0].logprobs] for output in outputs]
    return dict(zip(names, found, strict=True))
