"""A process that follows rank 0 of an instance: kept by a connection. Processes are threads."""

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
from serving.cluster.node import NodeProcess, gang_of
from serving.http.settings import HttpSettings
from serving.runtime.child_process import Pulse
from serving.runtime.gang import EXIT_LOST
from serving.runtime.gang_stream import GangPlace, GangRefused
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
    monkeypatch.setattr(module, "_END_S", 60.0)
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
    cluster = ClusterConfig(nnodes=4, nodes_secret_file="none")
    return Options(EngineConfig(model="m", tensor_parallel_size=8), HttpSettings(), cluster)


def test_a_process_follows_with_its_part_of_the_devices_and_ends_with_rank_0(host, options):
    process = NodeProcess(options, PLACE, host)
    (made,) = host.started
    host.over.set()
    made.join(60)
    process.stop()
    assert (made.name, made.exitcode) == ("node-3", 0)
    assert host.followed == [(options.engine, ("gang", PLACE))]
    assert host.gpus == [(0, 2)]


def test_a_process_that_does_not_fit_says_so(host, options, caplog):
    host.exits_with = StartError("Cannot serve on 4 nodes: too few devices")
    process = NodeProcess(options, PLACE, host)
    host.started[0].join(60)
    process.stop()
    assert "Node 3: Cannot serve on 4 nodes: too few devices" in caplog.text
    assert host.started[0].exitcode == 1


def test_a_process_answers_while_it_computes_and_leaves_when_nobody_keeps_it(host, options):
    process = NodeProcess(options, PLACE, host)
    for _ in range(3):
        assert process.pulse(60) is Pulse.UP
    wait_until(lambda: host.followed)
    process.stop()
    assert host.started[0].exitcode == EXIT_LOST
    assert process.pulse(0) is Pulse.SILENT


def test_a_process_that_hangs_is_silent(host, options, monkeypatch):
    monkeypatch.setattr(module, "_answer", lambda life: None)
    process = NodeProcess(options, PLACE, host)
    assert process.pulse(0.05) is Pulse.SILENT
    process.kill()
    process.stop()
    assert host.started[0].exitcode == -signal.SIGKILL


def test_an_instance_of_one_host_meets_nobody_and_what_differs_is_told(options, monkeypatch):
    assert gang_of(options, None) is None
    monkeypatch.setattr(module, "about_of", lambda engine: {})

    def refuse(*given):
        raise GangRefused("Nodes [1] of 4 have not come within 600 s.")

    monkeypatch.setattr(module, "Gang", refuse)
    with pytest.raises(StartError, match=r"Cannot serve on 4 nodes: Nodes \[1\] of 4"):
        gang_of(options, PLACE)
