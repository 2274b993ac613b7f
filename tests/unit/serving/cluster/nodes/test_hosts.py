"""Roles on two nodes of this machine: their agents meet rank 0, start processes, and are lost."""

import dataclasses
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.processes.server_process import ROOT, free_port
from support.waiting import wait_until

from serving.api.cluster_config import ClusterConfig
from serving.cli.serve import StartError
from serving.cluster.nodes import agent as node_agent
from serving.cluster.nodes import hosts as module
from serving.cluster.nodes import link
from serving.cluster.nodes.agent import Starts, answer_calls
from serving.cluster.nodes.hosts import NodeHosts, meet_nodes, options_of_roles
from serving.cluster.nodes.seats import seats_of
from serving.launch import read_options
from serving.runtime.gang_stream import GangPlace, GangRefused, join_leader

ABOUT, SECRET = {"--max-loras": "2"}, b"s" * 32
ECHO = """
import os

def echo(connection):
    while True:
        connection.send_bytes(connection.recv_bytes() + b"%d" % os.getpid())
"""


@pytest.fixture(autouse=True)
def _a_busy_machine_is_no_silence(monkeypatch):
    for side in (node_agent, link):
        monkeypatch.setattr(side, "SILENT_S", 60.0)
    monkeypatch.setattr(module, "_SHORT_S", 60.0)


class Agent:
    """Another node, on a thread."""

    def __init__(self, port, about=ABOUT):
        self.place = GangPlace(1, 2, ("127.0.0.1", port), SECRET, 60.0)
        self.about, self.said, self.joined = about, [], Future()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            connection, _ = join_leader(self.place, self.about)
        except GangRefused as error:
            self.said.append(str(error))
            return
        self.joined.set_result(connection)
        self.said.append(answer_calls(connection, Starts()))

    def end(self):
        self.thread.join(60)
        return self.said


def new_hosts(port, wait_s=60.0):
    place = GangPlace(0, 2, ("127.0.0.1", port), SECRET, wait_s)
    return NodeHosts(seats_of(1, 1, 1, 2), place, ABOUT)


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "told_nodes.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    return importlib.import_module("told_nodes").echo


def started(host, echo):
    ours, ticket = host.pipe()
    process = host.process(echo, (ticket,), "role")
    process.start()
    ours.send_bytes(b"pid ")
    assert ours.poll(60)
    return process, ours, int(ours.recv_bytes().removeprefix(b"pid "))


def test_roles_run_on_their_nodes_and_a_lost_node_comes_back(port, echo, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    agent = Agent(port)
    hosts = new_hosts(port)
    assert "for node 1. 127.0.0.1 is this host's own loopback: other hosts do not" in caplog.text
    (first,), second = hosts.instance(0), hosts.server_rank(0)
    assert (first.address, second.address) == ("127.0.0.1", "127.0.0.1")
    assert first.has_own_gpus
    assert hosts.answer_here  # a rank of the LoRA Server answers no client
    with socket.create_server(("127.0.0.1", second.free_port())):
        pass
    hosts.require_folder(str(tmp_path))
    assert not list(tmp_path.glob(".seen*"))
    (one, line, pid), (two, other, far) = started(first, echo), started(second, echo)
    assert len({pid, far, os.getpid()}) == 3
    assert isinstance(one.is_at_work(), bool)
    one.kill()
    one.join(60)
    assert (one.exitcode, one.is_alive()) == (-signal.SIGKILL, False)
    with pytest.raises(EOFError):
        line.recv_bytes()  # its connection ends with it

    agent.joined.result(60).close()  # as when the node's host is lost
    two.join(60)
    assert two.exitcode == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{far}").exists())
    with pytest.raises(ConnectionError, match=r"Node 1 is not there\."):
        hosts.server_rank(0)
    assert not two.is_at_work()
    back = Agent(port)
    wait_until(lambda: 1 in hosts._nodes)
    again, last, _ = started(hosts.server_rank(0), echo)
    hosts.close()
    hosts.close()
    again.join(60)
    assert back.end() == [None]  # rank 0 has ended it
    with pytest.raises(ConnectionError, match="is not there"):
        hosts.instance(0)
    for process, connection in ((one, line), (two, other), (again, last)):
        process.close()
        connection.close()


def test_a_node_that_does_not_fit_ends_the_start_with_what_differs(port):
    agent = Agent(port, {"--max-loras": "3"})
    with pytest.raises(
        GangRefused, match=r"Node 1 does not fit: --max-loras is '3' on node 1 and '2'"
    ):
        new_hosts(port)
    (said,) = agent.end()
    assert "--max-loras is '3' on node 1 and '2' on rank 0" in said


def test_a_node_that_is_back_before_it_is_missed_waits_until_it_is(port):
    """As after a pause of this process, in which the node has given up its connection."""
    agent, hosts = Agent(port), new_hosts(port)
    old = hosts._nodes[1]
    back = Agent(port)
    with pytest.raises(TimeoutError):
        back.joined.result(0.1)
    old._end("no word")
    assert agent.end() == ["the connection was closed"]
    back.joined.result(60)
    wait_until(lambda: hosts._nodes.get(1) not in (None, old))
    hosts.close()
    assert back.end() == [None]


def test_a_stranger_is_sent_away_and_a_second_node_of_a_rank_too(port, caplog, monkeypatch):
    monkeypatch.setattr(module, "_FREE_S", 0.05)
    agent, hosts = Agent(port), new_hosts(port)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\0" * 100)
        while stranger.recv(4096):
            pass
    twice = Agent(port)
    assert "--node-rank 1 is taken" in twice.end()[0]
    assert "Rejected a connection from 127.0.0.1" in caplog.text
    assert hosts.server_rank(0).sees("/", b"") is False
    hosts.close()
    assert agent.end() == [None]


@pytest.fixture
def options(port, tmp_path):
    """Options of rank 0; signals are as before when the test ends."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path), "--instances", "3", "--master-port", str(port), "--nnodes"]
    before = signal.getsignal(signal.SIGTERM)
    yield lambda nodes: read_options(
        [*words, str(nodes), "--nodes-secret-file", str(tmp_path / "secret")], {}
    )
    signal.signal(signal.SIGTERM, before)


def test_a_node_that_does_not_come_and_a_taken_port_are_refused(port, options):
    with pytest.raises(GangRefused, match=r"Nodes \[1\] of 2 have not come within 0\.05 s"):
        new_hosts(port, 0.05)
    said = f"2 nodes: Cannot listen on .* --master-port {port}: .* in use; give all nodes another"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(StartError, match=said):
        meet_nodes(options(2))


def test_a_short_secret_is_refused(tmp_path, options):
    given = options(2)
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(StartError, match="2 nodes: The secret of the nodes has 5 bytes"):
        meet_nodes(given)


def test_a_role_of_several_is_on_one_host_and_one_that_is_alone_on_all(tmp_path, options):
    several = options(2)
    assert several.cluster.instances == 3
    assert options_of_roles(several).cluster.nnodes == 1
    alone = ClusterConfig(nnodes=2, nodes_secret_file=str(tmp_path / "secret"))
    one = dataclasses.replace(
        several, cluster=alone, engine=dataclasses.replace(several.engine, tensor_parallel_size=2)
    )
    assert options_of_roles(one) is one


def test_rank_0_meets_its_nodes_without_jax():
    code = "import sys, serving.cluster.nodes.hosts; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_an_instance_over_all_nodes_has_a_process_on_each(port, tmp_path):
    agent = Agent(port)
    place = GangPlace(0, 2, ("127.0.0.1", port), SECRET, 60.0)
    hosts = NodeHosts(seats_of(1, 4, 0, 2), place, ABOUT)
    first, second = hosts.instance(0)
    assert (first._gpus, second._gpus) == ((0, 2), (0, 2))
    assert (type(first._node), type(second._node)) == (node_agent.OwnNode, link.FarNode)
    assert hosts.answer_here  # clients are answered by the first
    agent.joined.result(60)._sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: 1 not in hosts._nodes)
    with pytest.raises(ConnectionError, match=r"Node 1 is not there\."):
        hosts.instance(0)
    hosts.close()
    agent.end()


def test_instances_of_several_nodes_do_not_all_answer_here(port):
    agent = Agent(port)
    place = GangPlace(0, 2, ("127.0.0.1", port), SECRET, 60.0)
    hosts = NodeHosts(seats_of(2, 1, 0, 2), place, ABOUT)
    assert not hosts.answer_here
    hosts.close()
    assert agent.end() == [None]


def test_a_start_that_is_stopped_ends_the_nodes_that_have_come(port, options):
    """They would wait ten minutes for it to come back, and so would a signal that ends no wait.

    One does not that another thread gets, or that comes just before the wait.
    """
    given = options(3)
    agent = Agent(port, node_agent.about_roles(given))
    stop = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
    agent.joined.add_done_callback(lambda joined: stop.start())
    with pytest.raises(SystemExit) as ending:
        meet_nodes(given)
    assert ending.value.code == 0
    assert agent.end() == [None]


def test_a_folder_that_a_node_does_not_see_is_refused(port, tmp_path, monkeypatch):
    agent, hosts = Agent(port), new_hosts(port)
    monkeypatch.setattr(module.NodeHost, "sees", lambda host, path, content: host._gpus is None)
    with pytest.raises(ConnectionError, match=r"is not seen by node 0\. Instances share"):
        hosts.require_folder(str(tmp_path))
    assert not list(tmp_path.iterdir())
    hosts.close()
    agent.end()
