"""The handle of an instance: what its process says, and what is asked of it. No process runs."""

import json
import os
import signal
import socket
import threading

import pytest
from support.doubles.held_host import HeldHost

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.options import Options
from serving.cli.serve import Started, StartError
from serving.cluster import instance_process as module
from serving.cluster.addresses import FarAddress
from serving.cluster.instance_process import InstanceProcess, InstanceSeat, instance_main
from serving.http.settings import HttpSettings
from serving.runtime import pulses
from serving.runtime.child_process import Pulse
from serving.runtime.gang_stream import GangPlace


def options(**engine):
    nodes = ClusterConfig(distributed_executor_backend="ray", nnodes=engine.pop("nodes", 1))
    return Options(EngineConfig(model="m", **engine), HttpSettings(), nodes)


@pytest.fixture
def host():
    made = HeldHost()
    yield made
    made.close()


def test_an_instance_says_where_it_is_and_how_large_bodies_may_be():
    host = HeldHost("10.0.0.1")
    process = InstanceProcess(options(), 3, "unused", None, None, (host,))
    assert process.path == FarAddress("10.0.0.1", 0, process.path.secret)
    (made,) = host.made
    given, seat = made.args[3:5]
    assert (made.name, made.is_started) == ("instance-3", True)
    assert given.http.front_secret == process.path.secret  # it answers this front alone
    assert (seat.number, seat.first_gpu, seat.gang) == (3, 0, None)
    host.ends[0].send_bytes(b'ready {"body_bytes": 4096, "port": 7001, "digests": {"law": "aa"}}')
    process.wait_ready()
    assert (process.is_ready, process.body_bytes, process.path.port) == (True, 4096, 7001)
    assert process.digests == {"law": "aa"}
    process.kill()
    process.stop()
    assert made.exitcode == -signal.SIGKILL
    host.close()


def test_an_instance_repeats_its_journal_or_is_told_of(host, monkeypatch):
    process = InstanceProcess(options(), 0, "path", None, None, (host,))
    end = host.ends[0]
    end.send_bytes(json.dumps({"sql": "its files have changed"}).encode())
    assert process.replay() == {"sql": "its files have changed"}
    assert end.recv_bytes() == module._REPLAY
    monkeypatch.setattr(module, "_REPLAY_S", 0.01)
    for answer in (None, b"no JSON"):
        if answer is not None:
            end.send_bytes(answer)
        with pytest.raises(ConnectionError, match="Instance 0 did not repeat the journal"):
            process.replay()
    process.kill()
    process.stop()


def test_an_instance_whose_other_host_is_not_there_does_not_start(host):
    first, second = HeldHost("10.0.0.1"), HeldHost("10.0.0.2")
    second.why = ConnectionError("the host of rank 1 does not answer")
    asked = options(nodes=2, tensor_parallel_size=2)
    with pytest.raises(ConnectionError, match="rank 1 does not answer"):
        InstanceProcess(asked, 0, "path", None, None, (first, second))
    assert first.made[0].exitcode == -signal.SIGKILL
    first.close()
    second.close()


@pytest.fixture
def over_two_hosts():
    first, second = HeldHost("10.0.0.1"), HeldHost("10.0.0.2")
    asked = options(nodes=2, tensor_parallel_size=2)
    process = InstanceProcess(asked, 0, "path", None, None, (first, second))
    yield process, first, second
    process.kill()
    process.stop()
    first.close()
    second.close()


def test_a_follower_that_hangs_while_it_starts_is_killed_and_named(over_two_hosts, monkeypatch):
    process, first, second = over_two_hosts
    monkeypatch.setattr(pulses, "_LOOK_S", 0.01)
    echo = pulses.Echo(first.ends[1], lambda: None)  # rank 0 answers
    with pytest.raises(ConnectionError, match="Node 1 of instance 0 hangs while it starts"):
        process.wait_ready()
    assert (first.made[0].exitcode, second.made[0].exitcode) == (None, -signal.SIGKILL)
    assert not echo._has_ended


@pytest.mark.parametrize(("rank", "named"), [(0, "its process"), (1, "the process of node 1")])
def test_a_process_that_is_killed_instead_of_starting_may_have_lacked_memory(
    over_two_hosts, rank, named
):
    process, *hosts = over_two_hosts
    hosts[rank].made[0].finish(-signal.SIGKILL)
    for end in hosts[rank].ends:
        end.close()
    said = rf"did not start: {named} has ended \(SIGKILL\); for want of memory, if nobody"
    with pytest.raises(ConnectionError, match=said):
        process.wait_ready()


def test_a_follower_that_ends_instead_of_starting_is_named(over_two_hosts):
    process, _, second = over_two_hosts
    second.made[0].finish(1)
    with pytest.raises(ConnectionError, match="did not start: the process of node 1 has ended; "):
        process.wait_ready()


def test_each_start_over_hosts_has_a_secret_of_its_own_and_is_killed_on_all_of_them(over_two_hosts):
    process, first, second = over_two_hosts
    gang, follower = first.made[0].args[4].gang, second.made[0].args[2]
    assert (gang.rank, gang.size, follower.rank) == (0, 2, 1)
    assert (gang.secret, gang.address) == (follower.secret, follower.address)
    again = module._places_on((first, second))
    assert again[0].secret == again[1].secret != gang.secret
    process.kill()
    assert [host.made[0].exitcode for host in (first, second)] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("answer", "pulse"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", Pulse.UP),
        (b"HTTP/1.1 503 Busy\r\n\r\n", Pulse.UNWELL),
        (b"", Pulse.SILENT),
    ],
)
def test_its_health_is_its_answer_to_ready(host, tmp_path, answer, pulse):
    path = str(tmp_path / "socket")
    process = InstanceProcess(options(), 0, path, None, None, (host,))
    asked = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve():
            one, _ = listening.accept()
            with one:
                asked.append(one.recv(1 << 12))
                one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert process.pulse(20) is pulse
        thread.join(20)
    assert asked[0].startswith(b"GET /ready HTTP/1.1\r\n")
    assert process.pulse(1) is Pulse.SILENT  # nobody listens any more
    process.kill()
    process.stop()


def test_the_process_serves_functions_where_it_is_asked_to_and_ends_with_its_parent(
    host, tmp_path, monkeypatch
):
    from serving.cluster import functions_front

    (ours, life), (_, pulse) = host.pipe(), host.pipe()
    ended, killed, seen = threading.Event(), threading.Event(), []

    def kill(pid, number):
        seen.append((pid == os.getpid(), number))
        killed.set()

    def serve_functions(options, sock, announce):
        seen.append(sock.getsockname())
        announce(Started(lambda: {"sql": "is gone"}, 99, {"sql": "bb"}))
        assert ended.wait(60)

    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    monkeypatch.setattr(module.logs, "configure", lambda level: None)
    monkeypatch.setattr(module, "use_gpu", lambda *given: seen.append(given))
    monkeypatch.setattr(module.os, "kill", kill)
    monkeypatch.setattr(functions_front, "serve_functions", serve_functions)
    functions = Options(
        EngineConfig(model="m"), HttpSettings(), functions=FunctionsConfig(functions="folder")
    )
    path = str(tmp_path / "socket")
    seat = InstanceSeat("instance-1 x", 1, path, 1, None)
    thread = threading.Thread(target=instance_main, args=(life, pulse, None, functions, seat, None))
    thread.start()
    said = json.loads(ours.recv_bytes().removeprefix(module._READY))
    assert said == {"body_bytes": 99, "port": 0, "digests": {"sql": "bb"}}
    ours.send_bytes(module._REPLAY)
    assert json.loads(ours.recv_bytes()) == {"sql": "is gone"}
    ours.close()
    host.ends[0].close()
    assert killed.wait(60)
    ended.set()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [(1, 1), path, (True, signal.SIGTERM)]


def test_a_process_that_cannot_start_ends_and_one_of_a_gang_at_once(host, tmp_path, monkeypatch):
    """jax would say farewell to members that wait for this one."""

    def refuse(*given, **more):
        raise StartError("an adapter is missing")

    ended = []
    monkeypatch.setattr(module.signal, "signal", lambda *given: None)
    monkeypatch.setattr(module.logs, "configure", lambda level: None)
    monkeypatch.setattr(module, "use_gpu", lambda *given: None)
    monkeypatch.setattr(module, "gang_of", lambda *given: None)
    monkeypatch.setattr(module, "serve", refuse)
    monkeypatch.setattr(module.os, "_exit", ended.append)
    for gang in (None, GangPlace(0, 2, ("127.0.0.1", 1), b"s" * 32)):
        (_, life), (_, pulse) = host.pipe(), host.pipe()
        folder = tmp_path / f"gang-{gang is not None}"
        folder.mkdir()
        seat = InstanceSeat("instance-0 x", 0, str(folder / "socket"), 0, gang)
        with pytest.raises(SystemExit) as ending:
            instance_main(life, pulse, None, options(), seat, None)
        assert ending.value.code == 1
        assert ended == ([] if gang is None else [1])
