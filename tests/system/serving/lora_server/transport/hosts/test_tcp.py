"""The transport between hosts keeps the contract, and lets in only who knows the secret."""

import contextlib
import dataclasses
import os
import socket
import threading

import numpy as np
import pytest
from support.cases.transport_cases import (
    LONG,
    SECRET,
    batch,
    bits,
    connected,
    exchange,
    open_client,
    open_servers,
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

from serving.lora_server.transport.base import Status, TransportError
from serving.lora_server.transport.header import HEADER_BYTES, Header, Kind
from serving.lora_server.transport.hosts import tcp
from serving.lora_server.transport.socket_messages import call, receive, send


class TestTcp(TransportContract):
    transport = "tcp"


@pytest.mark.long
def test_a_killed_server_ends_the_wait_and_its_successor_joins():
    def connect(port):
        return tcp.open_client([("127.0.0.1", int(port))], terms_of(ep=1), SECRET)

    peers = Peers()
    kill_servers(peers, 0, connect, 3)
    peers.close()


def test_everything_is_given_back(tmp_path):
    terms = terms_of()

    def use():
        with connected("tcp", terms, tmp_path) as (client, _):
            x, ys, rows = batch(terms, np.random.default_rng(0), 24)
            assert not np.asarray(exchange(client)(x, ys, rows)[1]).any()

    use()
    before = held_by_this_process()
    for _ in range(3):
        use()
    wait_given_back(before)


def test_messages_larger_than_a_socket_holds_arrive_whole(tmp_path):
    terms = terms_of(max_rows=60_000)
    with connected("tcp", terms, tmp_path) as (client, _):
        x, ys, rows = batch(terms, np.random.default_rng(0), 60_000)
        got, status = exchange(client)(x, ys, rows)
        assert not np.asarray(status).any()
        wanted = want_ys(terms.shapes, 0, 1, x, ys, rows)
        assert [bits(y) for y in got] == [bits(y) for y in wanted]


def test_another_secret_is_refused(tmp_path):
    with open_servers("tcp", terms_of(ep=1), tmp_path) as servers:
        port = int((tmp_path / "rank-0.port").read_text())
        with pytest.raises(TransportError, match="The secrets differ; start both sides with"):
            tcp.open_client([("127.0.0.1", port)], terms_of(ep=1), SECRET + b"x")
        with pytest.raises(TransportError, match="The secrets differ"):
            call(("127.0.0.1", port), {}, 0, _guess)
        assert servers[0].clients() == ()
        with pytest.raises(TransportError, match="placement: the server has EP1-PP1"):
            tcp.open_client([("127.0.0.1", port)] * 2, terms_of(pp=2, ep=1), SECRET, patience=LONG)


def _guess(connection):
    send(connection, {"nonce": "\ud800"})
    receive(connection)
    send(connection, {"proof": "é"})
    raise TransportError(receive(connection)[0]["refused"])


def test_a_server_that_does_not_know_the_secret_is_not_joined():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pretend(connection):
            """Say the client's own words back."""
            send(connection, {"nonce": receive(connection)[0]["nonce"]})
            send(connection, receive(connection)[0])

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    try:
                        pretend(connection)
                    except (OSError, ValueError):
                        continue

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TransportError, match="does not know the secret"):
            tcp.open_client([listening.getsockname()], terms_of(ep=1), SECRET)
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(LONG)


def test_a_short_secret_is_refused():
    listening = tcp.listen("127.0.0.1", 0)
    with pytest.raises(ValueError, match="16 bytes or more, got 5"):
        tcp.open_server(listening, terms_of(ep=1), 0, b"short")
    assert listening.fileno() == -1
    with pytest.raises(ValueError, match="16 bytes or more"):
        tcp.open_client([("127.0.0.1", 1)], terms_of(ep=1), b"short")


def joined_by_hand(port):
    """Return a connection that has joined, and its epoch."""
    admit = tcp.Tcp(SECRET).admit_server
    said = {"facts": terms_of(ep=1).facts(0), "last_epoch": 0}
    connection, answer, _ = call(("127.0.0.1", port), said, 0, admit)
    connection.settimeout(LONG)
    return connection, answer["epoch"]


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 25, "num_bytes": 25 * 88},
        {"rows": 0, "num_bytes": 0},
        {"rows": -1},
        {"num_bytes": 1 << 50},
        {"site": 2},
        {"layer": 4},
        {"epoch": 9},
        {"sequence": 0},
        {"kind": Kind.RESPONSE},
        None,
    ],
)
def test_a_stranger_message_ends_the_connection(tmp_path, change):
    """Behind a header that is not right nobody knows where the next one begins."""
    with open_servers("tcp", terms_of(ep=1), tmp_path) as servers:
        connection, epoch = joined_by_hand(int((tmp_path / "rank-0.port").read_text()))
        header = Header(epoch, 1, 0, 0, 2, Kind.REQUEST, 0, 2 * 88)
        data = os.urandom(HEADER_BYTES)
        if change is not None:
            data = dataclasses.replace(header, **change).pack()
        connection.sendall(data + bytes(100))
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        wait_until(lambda: servers[0].clients() == ())
        assert servers[0].receive(0) is None
        connection.close()


def test_a_message_cut_short_is_not_shown(tmp_path):
    with open_servers("tcp", terms_of(ep=1), tmp_path) as servers:
        connection, epoch = joined_by_hand(int((tmp_path / "rank-0.port").read_text()))
        header = Header(epoch, 1, 0, 0, 2, Kind.REQUEST, 0, 2 * 88)
        connection.sendall(header.pack() + bytes(2 * 88 - 1))
        connection.close()
        wait_until(lambda: servers[0].clients() == ())
        assert servers[0].receive(0) is None


def test_an_answer_that_comes_too_late_finds_nobody(tmp_path):
    terms = terms_of(ep=1)
    with open_servers("tcp", terms, tmp_path) as servers:
        client = open_client("tcp", terms, servers, tmp_path)
        client.set_limit(0.02)
        x, ys, rows = batch(terms, np.random.default_rng(0), 8, base_share=0.0)
        step = exchange(client)
        assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.TIMED_OUT]
        late = servers[0].receive(LONG)
        assert late is not None
        wait_until(lambda: client.rejoin() == ())
        wait_until(lambda: late.client not in servers[0].clients())
        assert not servers[0].refuse(late)
        client.close()
