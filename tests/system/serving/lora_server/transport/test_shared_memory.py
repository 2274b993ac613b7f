"""The transport between processes keeps the contract, also when one of them is killed."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from support.cases.transport_cases import (
    LONG,
    batch,
    bits,
    connected,
    exact_deltas,
    exchange,
    open_client,
    open_servers,
    serving,
    terms_of,
    want_ys,
)
from support.contracts.transport_contract import TransportContract
from support.processes.transport_faults import (
    held_by_this_process,
    kill_servers,
    wait_given_back,
)
from support.processes.transport_peer import Peers
from support.waiting import wait_until

from serving.lora_server.transport import shared_memory, socket_messages
from serving.lora_server.transport.base import Status, TransportError


class TestSharedMemory(TransportContract):
    transport = "shared_memory"


@pytest.fixture(scope="module")
def peers():
    made = Peers()
    yield made
    made.close()


def test_a_killed_server_ends_the_wait_and_its_successor_joins(peers, tmp_path):
    def connect(path):
        return shared_memory.open_client([path], terms_of(ep=1))

    kill_servers(peers, tmp_path / "rank-0.sock", connect, 20)


def test_a_server_that_hangs_is_given_up_and_taken_back(peers, tmp_path, monkeypatch):
    """Its connection stays, so that only the bound ends the wait; what it says late is lost."""
    terms, path = terms_of(ep=1), tmp_path / "rank-0.sock"
    pid = peers.start("serve", path, 0, 1, 0)
    peers.expect("listening")
    client = shared_memory.open_client([path], terms)
    monkeypatch.setattr(socket_messages, "_SECONDS", 0.1)  # of a call that will not be answered
    x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=0.2)
    wanted = [bits(y) for y in want_ys(terms.shapes, 0, 1, x, ys, rows)]
    step = exchange(client)
    for _ in range(3):
        client.set_limit(LONG)
        got, status = step(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.ARRIVED]
        assert [bits(y) for y in got] == wanted
        os.kill(pid, signal.SIGSTOP)
        wait_until(
            lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        )
        client.set_limit(0.05)
        got, status = step(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.TIMED_OUT]
        assert [bits(y) for y in got] == [bits(y) for y in ys]
        assert client.rejoin() == (0,)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: client.rejoin() == ())
    client.close()
    peers.kill(pid)


def test_a_killed_client_leaves_nothing(peers, tmp_path):
    terms = terms_of(ep=1)
    path = tmp_path / "rank-0.sock"
    server = shared_memory.open_server(path, terms, 0)
    before = held_by_this_process()
    for _ in range(3):
        pid = peers.start("push", path, 1)
        peers.expect("pushed")
        request = server.receive(LONG)
        assert request is not None
        assert (request.rows, request.layer, request.table_version) == (2, 1, 3)
        peers.kill(pid)
        wait_until(lambda: server.clients() == ())
        assert not server.respond(request, exact_deltas(request, terms.shapes))
        del request
        wait_given_back(before)
    server.close()
    assert not path.exists()


def test_everything_is_given_back(tmp_path):
    terms = terms_of()
    with connected("shared_memory", terms, tmp_path) as (client, _):
        x, ys, rows = batch(terms, np.random.default_rng(0), 24)
        jax.block_until_ready(exchange(client)(x, ys, rows))
    before = held_by_this_process()
    for _ in range(3):
        with connected("shared_memory", terms, tmp_path) as (client, _):
            assert client.lost() == ()
    wait_given_back(before)
    assert list(tmp_path.iterdir()) == []


def test_nobody_there_is_told(tmp_path):
    with pytest.raises(TransportError, match=r"No LoRA Server of rank 0 answers at .*nowhere"):
        shared_memory.open_client([tmp_path / "nowhere"], terms_of(ep=1), patience=0.05)


def test_a_server_that_starts_later_is_waited_for(tmp_path):
    terms, path = terms_of(ep=1), tmp_path / "rank-0.sock"
    clients = []
    thread = threading.Thread(
        target=lambda: clients.append(shared_memory.open_client([path], terms, patience=LONG))
    )
    thread.start()
    server = shared_memory.open_server(path, terms, 0)
    thread.join(LONG)
    assert clients[0].lost() == ()
    clients[0].close()
    server.close()


@pytest.mark.parametrize("wrong", ["epoch", "memory", "size"])
def test_what_a_server_hands_over_is_checked(tmp_path, monkeypatch, wrong):
    terms, path = terms_of(ep=1), tmp_path / "rank-0.sock"

    def join(last_epoch):
        number, joined = right_join(last_epoch)
        if wrong == "epoch":
            return number, dataclasses.replace(joined, epoch=last_epoch)
        if wrong == "size":
            os.dup2(joined.bell, joined.channel)
        else:
            with open(tmp_path / "file", "wb") as file:
                os.dup2(file.fileno(), joined.channel)
        return number, joined

    with open_servers("shared_memory", terms, tmp_path) as servers:
        before = held_by_this_process()
        right_join = servers[0].join
        monkeypatch.setattr(servers[0], "join", join)
        said = {"epoch": "epoch 0 after 0", "memory": "not memory", "size": "4096 bytes"}[wrong]
        with pytest.raises(TransportError, match=said):
            shared_memory.open_client([path], terms)
        wait_given_back(before)


def test_the_same_server_is_joined_again_under_a_new_epoch(tmp_path):
    terms = terms_of(ep=1)
    with open_servers("shared_memory", terms, tmp_path) as servers:
        client = open_client("shared_memory", terms, servers, tmp_path)
        client.set_limit(0.02)
        x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=0.0)
        step = exchange(client)
        assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.TIMED_OUT]
        late = servers[0].receive(LONG)
        assert late is not None
        wait_until(lambda: client.rejoin() == ())
        wait_until(lambda: late.client not in servers[0].clients())  # a thread of its own sees it
        assert not servers[0].respond(late, exact_deltas(late, terms.shapes))
        client.set_limit(LONG)
        with serving(servers[0], lambda r: exact_deltas(r, terms.shapes)):
            got, status = step(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.ARRIVED]
        wanted = want_ys(terms.shapes, 0, 1, x, ys, rows)
        assert [bits(y) for y in got] == [bits(y) for y in wanted]
        client.close()
