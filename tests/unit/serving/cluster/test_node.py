"""A host that follows rank 0: its process is kept, replaced and ended. Processes are threads."""

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
from support.doubles.held_host import HeldProcess
from support.waiting import wait_until

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster import node as module
from serving.cluster.node import Node, NodeProcess, serve_node
from serving.http.settings import HttpSettings
from serving.runtime.child_process import Pulse
from serving.runtime.gang import EXIT_LOST
from serving.runtime.gang_stream import GangPlace
from serving.runtime.role_host import ThisHost

PLACE = GangPlace(3, 4, ("127.0.0.1", 1), b"s" * 32)


class ThreadProcess(HeldProcess):
    """A process whose function runs in a thread; os._exit there ends it."""

    def __init__(self, name, target, args):
        super().__init__(name, args)
        self._target, self._ended = target, threading.Event()

    def start(self):
        super().start()
        self.thread = threading.Thread(target=self._target, args=self.args, daemon=True)
        self.thread.start()

    def finish(self, status):
        super().finish(status)
        self._ended.set()

    def join(self, timeout=None):
        self._ended.wait(timeout)


class Host(ThisHost):
    """Starts roles as threads; `follow` is what each start does once it has met the others."""

    def __init__(self):
        self.started, self.owners = [], {}
        self.over = threading.Event()
        self.follow = lambda: self.over.wait(60)
        self.exits_with = None  # StartError: the others do not fit

    def process(self, target, args, name):
        life = Connection(os.dup(args[0].fileno()))  # as a process has its own
        made = ThreadProcess(name, lambda *given: self.run(made, target, given), (life, *args[1:]))
        made.life = life
        self.started.append(made)
        return made

    def run(self, process, target, args):
        self.owners[threading.current_thread()] = self.owners[args[0]] = process
        with contextlib.suppress(SystemExit):
            target(*args)

    def exit(self, status):
        self.owners[threading.current_thread()].finish(status)
        raise SystemExit


@pytest.fixture
def host(monkeypatch):
    made = Host()
    monkeypatch.setattr(module, "THIS_HOST", made)
    monkeypatch.setattr(module, "_END_S", 60.0)
    monkeypatch.setattr(NodeProcess.__init__, "__defaults__", (None, made))
    monkeypatch.setattr(module.logs, "configure", lambda level: None)
    kept = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIG_IGN")}
    monkeypatch.setattr(module, "signal", SimpleNamespace(**kept, signal=lambda *_: None))
    monkeypatch.setattr(module, "os", SimpleNamespace(_exit=made.exit))
    answer = module._answer

    def answer_of_process(life):
        made.owners[threading.current_thread()] = made.owners[life]
        with contextlib.suppress(SystemExit):
            answer(life)

    monkeypatch.setattr(module, "_answer", answer_of_process)
    made.gpus, made.followed = [], []
    monkeypatch.setattr(module, "use_gpu", lambda *given: made.gpus.append(given))

    def gang_of(options, place):
        if made.exits_with is not None:
            raise made.exits_with
        return "gang", place

    def follow(engine, gang):
        made.followed.append((engine, gang))
        made.follow()

    monkeypatch.setattr(module, "gang_of", gang_of)
    monkeypatch.setitem(
        sys.modules, "serving.engine.parts.following", SimpleNamespace(follow=follow)
    )
    yield made
    made.over.set()
    for process in made.started:
        process.life.close()
    for process in made.started:
        process.thread.join(60)  # it may have no owner yet
    for thread in [one for one in made.owners if isinstance(one, threading.Thread)]:
        thread.join(60)
        assert not thread.is_alive(), "it would meet the real os._exit"


@pytest.fixture
def options():
    cluster = ClusterConfig(nnodes=2, node_rank=1, nodes_secret_file="none")
    return Options(EngineConfig(model="m", tensor_parallel_size=4), HttpSettings(), cluster)


def test_a_node_ends_with_rank_0(host, options):
    node = Node(options)
    host.over.set()
    node.wait()
    (process,) = host.started
    assert (process.name, process.exitcode) == ("node-1", 0)
    assert host.followed == [(options.engine, ("gang", None))]
    assert host.gpus == [(0, 2)]  # its part of the devices


def test_a_node_that_does_not_fit_says_so_and_is_not_started_again(host, options, caplog):
    host.exits_with = StartError("--max-loras is '3' there and '2' on rank 0")
    with pytest.raises(StartError, match="Node 1 cannot serve; see its log"):
        Node(options).wait()
    assert "Node 1: --max-loras is '3' there" in caplog.text
    assert [process.exitcode for process in host.started] == [1]


def test_a_process_that_has_lost_the_others_is_replaced(host, options, caplog):
    again = threading.Event()

    def follow():
        if len(host.started) == 1:
            host.exit(EXIT_LOST)  # as the gang's own watch does
        again.set()
        host.over.wait(60)

    host.follow = follow
    node = Node(options)
    assert again.wait(60)
    # Until then the handle is that of the first one, and a node that ends kills the second one.
    wait_until(lambda: node._process._process is host.started[1] and node._process.is_ready)
    assert "The process of this node has ended; restarting it." in caplog.text
    node.end()
    node.wait()
    first, second = host.started
    # The second one ended because the node hung up.
    assert (first.exitcode, second.exitcode) == (EXIT_LOST, EXIT_LOST)


def test_a_process_answers_while_it_computes_and_one_that_hangs_does_not(host, options):
    process = NodeProcess(options, PLACE, host)
    process.wait_up()
    assert process.is_ready
    for _ in range(3):
        process._life.send_bytes(b"an earlier question that nobody waited for")
    assert process.pulse(60) is Pulse.UP
    assert host.started[0].name == "node-3"
    wait_until(lambda: host.followed)  # a thread of the process answers before it follows
    assert host.followed == [(options.engine, ("gang", PLACE))]
    process.stop()
    assert host.started[0].exitcode == EXIT_LOST
    assert process.pulse(0) is Pulse.SILENT


def test_a_process_that_is_silent_is_not_up(host, options, monkeypatch):
    monkeypatch.setattr(module, "_answer", lambda life: None)
    monkeypatch.setattr(module, "_START_S", 0.05)
    process = NodeProcess(options)
    process.wait_up()
    assert not process.is_ready
    process.kill()
    process.stop()
    assert host.started[0].exitcode == -signal.SIGKILL


def test_a_signal_ends_a_node(host, options, monkeypatch, caplog):
    handlers, set_both = {}, threading.Event()

    def set_handler(number, handler):
        handlers[number] = handler
        if {signal.SIGTERM, signal.SIGINT} <= handlers.keys() and callable(handler):
            set_both.set()

    monkeypatch.setattr(module.signal, "signal", set_handler)

    def follow():
        assert set_both.wait(60)
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        host.over.wait(60)

    host.follow = follow
    with caplog.at_level("INFO"):
        serve_node(options)
    assert handlers.keys() >= {signal.SIGTERM, signal.SIGINT}
    assert "Node 1 of 2 follows rank 0 at 127.0.0.1:" in caplog.text
    assert host.started[0].exitcode == EXIT_LOST
