"""Before a row travels: terms are compared, strangers refused, and nothing stays of either."""

import contextlib
import os
import socket
import threading
import time

import pytest
from support.cases.transport_cases import LONG, open_client, open_servers, terms_of
from support.processes.transport_faults import held_by_this_process, wait_given_back

from serving.lora_server.transport import handshake, shared_memory, socket_messages
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.handshake import LAST_EPOCH
from serving.lora_server.transport.hosts import tcp
from serving.lora_server.transport.socket_messages import (
    Guest,
    Listener,
    call,
    receive,
    send,
    unix_listener,
    wait_for_end,
)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"base": "another"}, "base model: the server has tiny, the instance another; start both"),
        ({"ep": 1, "pp": 2}, "placement: the server has EP2-PP1, the instance EP1-PP2"),
        ({"max_rows": 8}, "rows in a slot: the server has 24, the instance 8; .*largest batch"),
        ({"dtype": "bfloat16"}, "dtype: the server has float32, the instance bfloat16"),
    ],
)
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_sides_that_do_not_fit_are_refused_at_start(tmp_path, transport, other, said):
    with open_servers(transport, terms_of(), tmp_path) as servers:
        before = held_by_this_process()
        with pytest.raises(TransportError, match=said):
            open_client(transport, terms_of(**other), servers, tmp_path)
        wait_given_back(before)
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"last_epoch": -1}, "no epoch after -1"),
        ({"last_epoch": LAST_EPOCH}, "no epoch after"),
        ({"last_epoch": "7"}, "another protocol"),
        ({"last_epoch": None}, "another protocol"),
        ({"facts": ["tiny"]}, "another protocol"),
        ({"facts": {"base model": {"a": 1}}}, "protocol: .* the instance nothing"),
    ],
)
def test_greetings_are_checked(tmp_path, change, said):
    terms = terms_of(ep=1)
    greeting = {"facts": terms.facts(0), "last_epoch": 0}
    with open_servers("shared_memory", terms, tmp_path) as servers:
        with pytest.raises(TransportError, match=said):
            call(tmp_path / "rank-0.sock", greeting | change, 2)
        assert servers[0].clients() == ()


def test_epochs_rise_with_every_client_and_over_what_a_client_has_seen(tmp_path):
    terms, epochs = terms_of(ep=1), []
    with open_servers("tcp", terms, tmp_path) as servers:
        for last_epoch in (0, 0, 40, 3):
            client = open_client("tcp", terms, servers, tmp_path)
            joined = servers[0].join(last_epoch)[1]
            epochs.append(joined.epoch)
            os.close(joined.channel)
            os.close(joined.bell)
            client.close()
    assert epochs == [2, 4, 41, 8]


def test_an_absurd_epoch_of_one_client_keeps_no_other_out(tmp_path):
    terms = terms_of(ep=1)
    absurd = {"facts": terms.facts(0), "last_epoch": LAST_EPOCH - 1}
    with open_servers("shared_memory", terms, tmp_path) as servers:
        connection, answer, fds = call(tmp_path / "rank-0.sock", absurd, 2)
        for fd in fds:
            os.close(fd)
        assert answer == {"epoch": LAST_EPOCH}
        client = open_client("shared_memory", terms, servers, tmp_path)
        assert len(servers[0].clients()) == 2
        client.close()
        connection.close()


@pytest.mark.parametrize("epoch", [0, (1 << 32) + 1, LAST_EPOCH, "1"])
def test_an_epoch_that_would_keep_the_client_out_later_is_refused(tmp_path, epoch):
    def welcome(said):
        fds = [os.memfd_create("one"), os.memfd_create("two")]
        return Guest({"epoch": epoch}, fds, wait_for_end, lambda: None)

    listener = Listener(unix_listener(tmp_path / "rank-0.sock"), welcome)
    with pytest.raises(TransportError, match=r"gave epoch .* after 0, allowed are 1 to 4294967296"):
        shared_memory.open_client([tmp_path / "rank-0.sock"], terms_of(ep=1))
    listener.close()


def test_a_rank_outside_the_plan_closes_the_socket():
    listening = tcp.listen("127.0.0.1", 0)
    with pytest.raises(ValueError, match="EP2-PP1 has ranks 0 to 1, not 2"):
        tcp.open_server(listening, terms_of(), 2, b"0123456789abcdef")
    assert listening.fileno() == -1


def test_the_first_answer_is_waited_for_as_long_as_the_listener(tmp_path, monkeypatch):
    """Before: an instance did not start beside a rank that listened and answered after 2 s."""
    monkeypatch.setattr(socket_messages, "_SECONDS", 0.05)
    path, asked, ended = tmp_path / "rank-0.sock", [], threading.Event()

    def listen(listening):
        while len(asked) < 2:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(ValueError):  # of who only looks for a listener
                asked.append(receive(connection)[0])
                if len(asked) == 1:
                    time.sleep(0.2)
                    send(connection, {"refused": "come later"})
                else:
                    assert ended.wait(LONG)

    with unix_listener(path) as listening:
        thread = threading.Thread(target=listen, args=(listening,))
        thread.start()
        transport = tcp.Tcp(tcp.NO_SECRET)
        (caller,) = handshake.callers(transport, [path], terms_of(ep=1), LONG)
        with pytest.raises(TransportError, match="come later"):
            caller.join(0)
        with pytest.raises(TransportError, match="did not answer"):
            caller.join(0)
        ended.set()
        thread.join(LONG)
    assert not thread.is_alive()
