"""A node's agent: starts processes, ends them with rank 0, and says what must be equal."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.tcp_pair import tcp_pair
from support.waiting import wait_until

from serving.api.cluster_config import ClusterConfig
from serving.cli.serve import StartError
from serving.cluster.far.member import call_bytes
from serving.cluster.nodes import agent as module
from serving.cluster.nodes import link
from serving.cluster.nodes.agent import (
    OwnNode,
    Starts,
    about_roles,
    answer_calls,
    place_of,
    serve_agent,
)
from serving.cluster.nodes.link import FarNode
from serving.launch import read_options
from serving.runtime.about import difference
from serving.runtime.gang_stream import Connection, GangRefused

ASLEEP = call_bytes("role", time.sleep, (100,))


@pytest.fixture(autouse=True)
def _a_busy_machine_is_no_silence(monkeypatch):
    for side in (module, link):
        monkeypatch.setattr(side, "SILENT_S", 60.0)


def said_gpus(path):
    text = f"import os; open({str(path)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    return call_bytes("role", exec, (text,))


class Agent:
    """An agent on a thread, and rank 0's side of its connection."""

    def __init__(self):
        ours, theirs = tcp_pair()
        self.starts, self.ends = Starts(), []
        self.thread = threading.Thread(target=self._run, args=(Connection(theirs),))
        self.thread.start()
        self.node = FarNode(Connection(ours), "10.0.0.7", lambda why: None)

    def _run(self, connection):
        self.ends.append(answer_calls(connection, self.starts))

    def end(self):
        self.node.close()
        self.thread.join(60)
        return self.ends


def test_a_start_has_its_part_of_the_gpus_that_the_node_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    agent, file = Agent(), tmp_path / "gpus"
    assert agent.node.call(1, "run", said_gpus(file), (1, 2)).result(60) == 0
    assert file.read_text() == "5,6,4"
    with pytest.raises(ConnectionError, match=r"ValueError: .* needs GPUs 2 to 3.* lists 3"):
        agent.node.call(2, "run", said_gpus(file), (2, 2)).result(60)
    with pytest.raises(ConnectionError, match="KeyError: 'no_method'"):
        agent.node.call(2, "no_method").result(60)
    file.write_bytes(b"x")
    assert agent.node.call(3, "sees", str(file), b"x").result(60)
    assert agent.end() == [None]


def test_an_agent_beats_until_it_ends(monkeypatch):
    """Rank 0 takes a node for lost that is silent."""
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    ours, theirs = map(Connection, tcp_pair())
    thread = threading.Thread(target=answer_calls, args=(theirs, Starts()))
    thread.start()
    assert [ours.receive(30.0) for _ in range(3)] == [(True, True)] * 3
    ours.send(None)
    thread.join(30)
    assert not thread.is_alive()
    ours.close()


@pytest.mark.parametrize("ending", ["killed", "ended", "lost"])
def test_what_was_started_ends_with_rank_0_or_by_its_word(ending):
    agent = Agent()
    running = agent.node.call(1, "run", ASLEEP, (0, 1))
    assert not running.done()
    wait_until(lambda: agent.starts._actors.get(1) and agent.starts._actors[1].pid())
    actor = agent.starts._actors[1]
    if ending == "killed":
        agent.node.call(1, "kill")
        assert running.result(60) == -signal.SIGKILL
        assert agent.node.call(1, "kill").result(60) is None  # as its handle is closed
        assert not agent.starts._actors
    elif ending == "lost":
        agent.node._connection.close()
    agent.end()
    assert agent.ends == ["the connection was closed" if ending == "lost" else None]
    assert actor._process.wait(60) == -signal.SIGKILL
    with pytest.raises(ConnectionError, match="this node's agent ends"):
        agent.starts.call(2, "is_at_work", ())


def test_an_end_is_waited_for_after_all_were_killed():
    """The next start of a role needs the GPU."""

    class Actor:
        def __init__(self, name):
            self.name = name

        def kill(self):
            said.append(("kill", self.name))

        def join(self, limit_s):
            said.append(("join", self.name))

    said, starts = [], Starts()
    starts._actors = {1: Actor("a"), 2: Actor("b")}
    starts.end()
    assert said == [("kill", "a"), ("kill", "b"), ("join", "a"), ("join", "b")]


def test_rank_0s_own_node_answers_as_the_others_do():
    node = OwnNode("10.0.0.1")
    running = node.call(1, "run", ASLEEP, (0, 1))
    wait_until(lambda: node._starts._actors.get(1) and node._starts._actors[1].pid())
    assert isinstance(node.call(1, "is_at_work").result(60), bool)
    with pytest.raises(ConnectionError, match="KeyError"):
        node.call(1, "no_method").result(60)
    node.close()
    assert running.result(60) == -signal.SIGKILL
    with pytest.raises(ConnectionError, match="this node's agent ends"):
        node.call(2, "is_at_work").result(60)


@pytest.fixture
def options(tmp_path):
    tiny_checkpoint.write_model(tmp_path / "model", TinyShape(layers=1))
    (tmp_path / "secret").write_text("s" * 32)
    words = [str(tmp_path / "model"), "--instances", "2", "--nnodes", "2", "--node-rank", "1"]
    words += ["--nodes-secret-file", str(tmp_path / "secret")]
    return lambda *more: read_options([*words, *more], {})


def test_roles_and_flags_must_be_equal_on_all_nodes(options):
    about = about_roles(options())
    assert [about[f"--{name}"] for name in ("nnodes", "instances", "lora-server")] == list("220")
    assert about == about_roles(options("--node-rank", "0"))
    assert about != about_roles(options("--instances", "3"))
    assert about != about_roles(options("--max-loras", "3"))


def test_the_model_is_at_one_path_on_all_nodes(options):
    given = options()
    here = Path(given.engine.model)
    there = dataclasses.replace(given.engine, model=str(here / "." / ".." / here.name))
    other = about_roles(dataclasses.replace(given, engine=there))
    assert difference(about_roles(given), other, "on rank 0").startswith("the model's path is")


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, 0), (0o440, 0), (0o644, 1), (0o660, 1)])
def test_a_secret_that_others_may_read_or_change_is_warned_of(tmp_path, caplog, mode, is_told):
    secret = tmp_path / "secret"
    secret.write_text("s" * 32 + "\n")
    secret.chmod(mode)
    place = place_of(ClusterConfig(nnodes=2, nodes_secret_file=str(secret)))
    assert place.secret == b"s" * 32
    assert caplog.text.count(f"(mode {mode:o}): whoever knows the secret runs code") == is_told


def test_an_agent_comes_back_to_a_rank_0_that_was_lost(options, monkeypatch, caplog):
    ends, joined, signals = ["silence", None], [], []
    monkeypatch.setattr(module.signal, "signal", lambda number, call: signals.append(number))
    monkeypatch.setattr(module, "join_leader", lambda *given: joined.append(given) or (None, ""))
    monkeypatch.setattr(module, "answer_calls", lambda connection, starts: ends.pop(0))
    with caplog.at_level("INFO"):
        serve_agent(options())
    assert "Rank 0 has ended, and node 1 ends with it." in caplog.text
    assert len(joined) == 2
    assert signals == [signal.SIGTERM, signal.SIGINT]
    assert "Node 1 has lost rank 0: silence" in caplog.text
    with pytest.raises(SystemExit):
        module.leave()


@pytest.mark.parametrize("why", ["refused", "secret"])
def test_an_agent_that_does_not_fit_says_what_to_change(options, monkeypatch, why):
    def refuse(*given):
        raise GangRefused("Rank 0 refuses node 1: --max-loras")

    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    monkeypatch.setattr(module, "join_leader", refuse)
    given = options()
    if why == "secret":
        os.unlink(given.cluster.nodes_secret_file)
    said = "No such file" if why == "secret" else "Rank 0 refuses node 1: --max-loras"
    with pytest.raises(StartError, match=f"Node 1 cannot serve: .*{said}"):
        serve_agent(given)
