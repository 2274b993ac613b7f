"""A process elsewhere gets the other end of a connection; who cannot prove himself gets nothing."""

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError

import pytest
from support.waiting import wait_until

from serving.cluster.far import switchboard
from serving.cluster.far.switchboard import Switchboard


@pytest.fixture
def board():
    made = Switchboard("127.0.0.1")
    yield made
    made.close()


def test_messages_go_both_ways_and_an_end_is_an_end_for_both(board):
    ours, ticket = board.ticket()
    theirs = ticket.redeem()
    ours.send_bytes(b"there?")
    assert theirs.recv_bytes() == b"there?"
    theirs.send_bytes(b"x" * 100_000)
    assert ours.recv_bytes() == b"x" * 100_000
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv_bytes()
    theirs.close()
    ours, ticket = board.ticket()
    theirs = ticket.redeem()
    theirs.close()
    with pytest.raises((EOFError, ConnectionError)):
        ours.recv_bytes()
    ours.close()


def test_what_was_said_before_the_other_side_came_is_not_lost(board):
    ours, ticket = board.ticket()
    ours.send_bytes(b"early")
    assert ticket.redeem().recv_bytes() == b"early"


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_process_that_has_ended_ends_its_connections(board, is_connected):
    ours, ticket = board.ticket()
    theirs = ticket.redeem() if is_connected else None
    wait_until(lambda: not is_connected or ticket.name in board._lines)
    board.drop(ticket)
    board.drop(ticket)
    with pytest.raises((EOFError, ConnectionError)):
        ours.recv_bytes()
    ours.close()
    if theirs is not None:
        theirs.close()


def test_a_wrong_secret_is_refused_and_a_ticket_is_good_once(board, caplog):
    ours, ticket = board.ticket()
    with pytest.raises((AuthenticationError, ConnectionError, EOFError)):
        dataclasses.replace(ticket, secret=b"another" * 4).redeem()
    wait_until(lambda: "which is no role of this cluster" in caplog.text)
    first = ticket.redeem()
    wait_until(lambda: ticket.name in board._lines)  # each call has a thread, which may be late
    second = ticket.redeem()
    with pytest.raises((EOFError, ConnectionError)):
        second.recv_bytes()
    ours.send_bytes(b"first")
    assert first.recv_bytes() == b"first"
    assert str(ticket.secret) not in repr(ticket)


def test_a_stranger_who_says_nothing_does_not_stop_others(board, monkeypatch, caplog):
    within, limited = switchboard._within, threading.Event()
    monkeypatch.setattr(switchboard, "_within", lambda *given: limited.set() or within(*given))
    monkeypatch.setattr(switchboard, "_PROOF_S", 1.0)
    with socket.create_connection(board.address):
        assert limited.wait(60)
        monkeypatch.setattr(switchboard, "_PROOF_S", 60.0)  # for the next one
        _, ticket = board.ticket()
        ticket.redeem().close()
        wait_until(lambda: "of this cluster: no proof came" in caplog.text)


def test_a_stranger_who_sends_little_by_little_is_sent_away_in_time(board, monkeypatch, caplog):
    monkeypatch.setattr(switchboard, "_PROOF_S", 0.3)
    left = struct.pack("!i", 250) + bytes(250)
    with socket.create_connection(board.address) as stranger, contextlib.suppress(OSError):
        while left and "which is no role of this cluster" not in caplog.text:
            left = left[stranger.send(left[:1]) :]
            time.sleep(0.05)
    wait_until(lambda: "which is no role of this cluster" in caplog.text)
    assert left


def test_tickets_whose_own_side_has_gone_hold_no_descriptors(board):
    """A role whose host is lost before its process starts redeems none."""
    for _ in range(3):
        ours, given_up = board.ticket()
        ours.close()
    ours, ticket = board.ticket()
    assert list(board._waiting) == [ticket.name]
    theirs = ticket.redeem()
    theirs.send_bytes(b"here")
    assert ours.recv_bytes() == b"here"
    with pytest.raises((EOFError, OSError)):
        given_up.redeem().recv_bytes()
    ours.close()
    theirs.close()
