"""Turns over sockets: granted, asked back, ended by death, and safe from wild talk."""

import socket
import sys
import time

import pytest

from serving.engine.loop.pacing import SWITCH_S
from serving.functions.turns.keeper import TurnKeeper
from serving.functions.turns.log import Stamps
from serving.functions.turns.messages import (
    ALONE,
    ASK,
    ASK_FIELDS,
    BACK,
    BACK_FIELDS,
    ENDED,
    FOLLOW,
    GRANT,
    RECALL,
    WORD,
)
from serving.functions.turns.table import TurnTable

_ASKS = ASK_FIELDS.pack(ASK, 1.0, 0.0, 0.01, 0.5)
_GIVES_BACK, _PASSES_ON = (BACK_FIELDS.pack(BACK, runs, 1.0, 2.0, 3.0, 4.0) for runs in (0, 1))


@pytest.fixture
def keeper():
    made = TurnKeeper(TurnTable(turn_s=0.0, overdue_s=60.0))  # a late test loses no turn
    yield made
    made.close()


def opened(keeper: TurnKeeper, name: str) -> socket.socket:
    end = keeper.open(name)
    end.settimeout(60)
    return end


def heard(end: socket.socket) -> bytes:
    """Return the letter of the next word; b"" at the end."""
    word = end.recv(99)
    return WORD.unpack(word)[0] if word else b""


def test_turns_go_round(keeper):
    with opened(keeper, "a") as a, opened(keeper, "b") as b:
        a.send(_ASKS)
        assert heard(a) == GRANT
        b.send(_ASKS)
        assert heard(a) == RECALL
        a.send(_GIVES_BACK)
        assert heard(b) == GRANT


def test_a_thread_that_ends_before_it_is_woken_does_not_disturb_the_close():
    keeper = TurnKeeper()

    class Late:
        """A lock that lets the thread see that it shall end, and end, before it is released."""

        def __enter__(self):
            pass

        def __exit__(self, *error):
            keeper._wake.send(b"\0")
            keeper._thread.join()

    keeper._lock = Late()  # pyright: ignore[reportAttributeAccessIssue]
    keeper.close()
    assert keeper._wake.fileno() == -1


def test_the_next_turn_begins_while_the_last_step_of_the_one_before_runs(keeper):
    with opened(keeper, "a") as a, opened(keeper, "b") as b:
        a.send(_ASKS)
        assert heard(a) == GRANT
        b.send(_ASKS)
        assert heard(a) == RECALL
        a.send(_PASSES_ON)
        assert heard(b) == FOLLOW
        before = time.monotonic()
        a.send(ENDED)
        word, at = WORD.unpack(b.recv(99))
        assert word == ALONE
        assert before <= at <= time.monotonic()
        first, second = keeper.log.turns
        back_s, last_step_s = first.back - first.recalled, first.ended - first.back
        assert keeper.table._hand_overs[0] == back_s + 0.5 * last_step_s
        assert (first.name, second.name) == ("a 1", "b 2")
        assert first.stamps == Stamps(1.0, 2.0, 3.0, 4.0)
        assert first.granted < first.recalled < first.back <= second.granted < first.ended <= at


def test_other_threads_of_the_agent_hold_a_hand_over_up_for_little_time():
    """The device is idle while the thread of the turns waits for the interpreter's lock."""
    before = sys.getswitchinterval()
    made = TurnKeeper(TurnTable(turn_s=0.0))
    with opened(made, "a") as a:
        a.send(_ASKS)
        assert heard(a) == GRANT
        assert sys.getswitchinterval() == pytest.approx(min(before, SWITCH_S))
    made.close()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_a_dead_function_gives_its_turn_back(keeper):
    a, b = opened(keeper, "a"), opened(keeper, "b")
    a.send(_ASKS)
    assert heard(a) == GRANT
    b.send(_ASKS)
    a.close()
    assert heard(b) == GRANT
    b.close()


def test_a_turn_that_cannot_be_told_goes_to_the_next_function(keeper):
    with opened(keeper, "a") as a, opened(keeper, "dead") as dead, opened(keeper, "b") as b:
        a.send(_ASKS)
        assert heard(a) == GRANT
        dead.shutdown(socket.SHUT_RD)  # the keeper's next word fails, and nothing was heard before
        dead.send(ASK_FIELDS.pack(ASK, 0.1, 0.0, 0.01, 0.05))
        b.send(_ASKS)
        assert heard(a) == RECALL
        time.sleep(0.05)
        a.send(_GIVES_BACK)
        assert heard(b) == GRANT


WILD = {
    "words": b"nonsense",
    "short": ASK,
    "numbers": ASK_FIELDS.pack(ASK, float("nan"), float("inf"), -1e300, 0.0),
}


@pytest.mark.parametrize("words", list(WILD.values()), ids=list(WILD))
def test_wild_talk_harms_its_sender_alone(keeper, words):
    with opened(keeper, "wild") as wild, opened(keeper, "b") as b:
        wild.send(words)
        b.send(_ASKS)
        while (word := heard(wild)) == GRANT:  # numbers are bounded, and granted a turn
            wild.send(_GIVES_BACK)
            wild.shutdown(socket.SHUT_RDWR)
        assert word in (b"", RECALL)
        wild.close()
        assert heard(b) == GRANT


class Loud:
    """A socket on which a function has always said more."""

    recvs = 0

    def recv(self, size: int) -> bytes:
        self.recvs += 1
        assert self.recvs < 1000, "it is heard without end"
        return _ASKS


def test_a_function_that_never_stops_talking_is_heard_in_parts(monkeypatch):
    keeper = TurnKeeper(TurnTable())
    keeper.close()  # its thread has ended
    loud = Loud()
    monkeypatch.setitem(keeper._sockets, "loud", loud)
    keeper._hear("loud")
    assert 0 < loud.recvs < 100
    assert keeper.table.grant(0.0) == "loud"


def test_the_end_leaves_functions_without_turns(keeper):
    with opened(keeper, "a") as a:
        keeper.close()
        keeper.close()
        assert heard(a) == b""
