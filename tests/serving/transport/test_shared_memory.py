"""The carrier between processes keeps the contract, also when one of them is killed."""

import dataclasses
import os
import socket
import threading

import jax
import numpy as np
import pytest
from transport_cases import (
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
from transport_contract import TransportContract, wait_for
from transport_peer import Peers

from serving.transport import shared_memory
from serving.transport.base import Status, TransportError


class TestSharedMemory(TransportContract):
    carrier = "shared_memory"


@pytest.fixture(scope="module")
def peers():
    made = Peers()
    yield made
    made.close()


def held_by_this_process():
    """What must not grow: descriptors, mappings of slots, threads."""
    with open("/proc/self/maps") as file:
        maps = sum("lora_jax_transport" in line for line in file)
    return len(os.listdir("/proc/self/fd")), maps, threading.active_count()


def killed_in_the_middle(peers, client, path, step, arrays):
    """One life of a server: joined anew, two answers, then killed while it holds a third."""
    x, ys, rows = arrays
    pid = peers.start("serve", path, 0, 1, 3)
    peers.expect("listening")
    assert client.rejoin() == ()
    wanted = want_ys(terms_of(ep=1).shapes, 0, 1, x, ys, rows)
    for _ in range(2):
        got, status = step(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.ARRIVED]
        assert [bits(y) for y in got] == [bits(y) for y in wanted]
    results = []
    waiter = threading.Thread(
        target=lambda: results.append(jax.block_until_ready(step(x, ys, rows)))
    )
    waiter.start()
    peers.expect("held")
    peers.kill(pid)
    waiter.join(LONG)
    got, status = results[0]
    assert np.asarray(status).tolist() == [Status.ABORTED]
    assert [bits(y) for y in got] == [bits(y) for y in ys]
    assert client.lost() == (0,)
    assert client.rejoin() == (0,)


def kill_servers(peers, folder, times):
    path, terms = folder / "rank-0.sock", terms_of(ep=1)
    pid = peers.start("serve", path, 0, 1, 0)
    peers.expect("listening")
    client = shared_memory.open_client([path], terms)
    client.set_limit(1000.0)  # so that nothing but the death itself ends a wait
    peers.kill(pid)
    wait_for(lambda: client.lost() == (0,))
    arrays = batch(terms, np.random.default_rng(0), 24, base_share=0.2)
    step = exchange(client)
    killed_in_the_middle(peers, client, path, step, arrays)
    before = held_by_this_process()
    for _ in range(times):
        killed_in_the_middle(peers, client, path, step, arrays)
    assert held_by_this_process() == before
    client.close()


def test_a_killed_server_ends_the_wait_and_its_successor_joins(peers, tmp_path):
    kill_servers(peers, tmp_path, 20)


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
        wait_for(lambda: server.clients() == ())
        assert not server.respond(request, exact_deltas(request, terms.shapes))
        del request
        wait_for(lambda: held_by_this_process() == before)
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
    assert held_by_this_process() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"base": "another"}, "base model: the server has tiny, the instance another; start both"),
        ({"ep": 1, "pp": 2}, "placement: the server has EP2-PP1, the instance EP1-PP2"),
        ({"max_rows": 8}, "rows in a slot: the server has 24, the instance 8; .*largest batch"),
        ({"dtype": "bfloat16"}, "dtype: the server has float32, the instance bfloat16"),
    ],
)
def test_sides_that_do_not_fit_are_refused_at_start(tmp_path, other, said):
    with open_servers("shared_memory", terms_of(), tmp_path) as servers:
        before = held_by_this_process()
        with pytest.raises(TransportError, match=said):
            open_client("shared_memory", terms_of(**other), servers, tmp_path)
        wait_for(lambda: held_by_this_process() == before)
        assert [server.clients() for server in servers] == [(), ()]


def test_addresses_in_the_wrong_order_are_refused(tmp_path):
    terms = terms_of()
    with open_servers("shared_memory", terms, tmp_path):
        paths = [tmp_path / "rank-1.sock", tmp_path / "rank-0.sock"]
        with pytest.raises(TransportError, match="in the order of their ranks"):
            shared_memory.open_client(paths, terms)
        with pytest.raises(ValueError, match="2 ranks and 1 addresses"):
            shared_memory.open_client(paths[:1], terms)
        with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
            shared_memory.open_server(tmp_path / "rank-2.sock", terms, 2)


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


def test_greetings_of_strangers_are_refused(tmp_path):
    with open_servers("shared_memory", terms_of(ep=1), tmp_path) as servers:
        for said in (b"", b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b"\x02\0\0\0{}", b"\x08\0\0\0half"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(LONG)
                stranger.connect(str(tmp_path / "rank-0.sock"))
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: stranger.recv(1000), b""))
                assert answer == b"" or b"refused" in answer
        assert servers[0].clients() == ()


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
        wait_for(lambda: held_by_this_process() == before)


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
        assert client.rejoin() == ()
        assert not servers[0].respond(late, exact_deltas(late, terms.shapes))
        client.set_limit(LONG)
        with serving(servers[0], lambda r: exact_deltas(r, terms.shapes)):
            got, status = step(x, ys, rows)
        assert np.asarray(status).tolist() == [Status.ARRIVED]
        wanted = want_ys(terms.shapes, 0, 1, x, ys, rows)
        assert [bits(y) for y in got] == [bits(y) for y in wanted]
        client.close()
