"""Calls to a node, over a socket whose other side the test plays: answers, errors, a lost node."""

import threading

import pytest
from support.tcp_pair import tcp_pair
from support.waiting import wait_until

from serving.cluster.nodes import link as module
from serving.cluster.nodes.link import FarNode
from serving.runtime.gang_stream import Connection


class Case:
    """A node; `far` is its side of the connection, `lost` what was told of its end."""

    def __init__(self):
        ours, theirs = tcp_pair()
        self.far, self.lost, self.pending = Connection(theirs), [], None
        self.node = FarNode(Connection(ours), "10.0.0.7", self._lost)

    def _lost(self, why):
        self.lost.append((why, self.pending is not None and self.pending.done()))

    def asked(self):
        while True:
            is_beat, value = self.far.receive(60.0)
            if not is_beat:
                return value


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 60.0)  # a beat too may find out that the other side ended
    made = Case()
    yield made
    made.far.close()
    made.node.close()


def test_answers_find_their_calls_in_any_order(case):
    first, second = case.node.call(3, "sees", "path", b"x"), case.node.call(4, "free_port", "a")
    (one, *asked), (two, *_) = case.asked(), case.asked()
    assert asked == [3, "sees", ("path", b"x")]
    case.far.send((two, None, 7001))
    case.far.send((one, "ValueError: it lists 2", None))
    case.far.send((99, None, "nobody asked"))
    assert second.result(60) == 7001
    with pytest.raises(ConnectionError, match="ValueError: it lists 2"):
        first.result(60)
    assert not case.lost


def test_a_node_that_ends_fails_its_calls_after_it_is_given_up(case):
    case.pending = case.node.call(1, "run", b"", (0, 1))
    case.asked()
    case.far.close()
    with pytest.raises(ConnectionError, match="closed"):
        case.pending.result(60)
    assert case.lost == [("the connection was closed", False)]
    with pytest.raises(ConnectionError, match="closed"):
        case.node.call(1, "kill").result(60)


class Beating:
    """A connection from which three beats come, each in time, and no word after them."""

    def __init__(self):
        self.waits, self.is_silent, self.time_is_over = [], threading.Event(), threading.Event()

    def receive(self, silent_s):
        self.waits.append(silent_s)
        if len(self.waits) <= 3:
            return True, True
        self.is_silent.set()
        assert self.time_is_over.wait(60)
        raise TimeoutError(f"no word for {silent_s:g} s")

    def send(self, value):
        """Nobody takes it."""

    def beat(self, *, serving):
        """Nobody hears it."""

    def close(self):
        """Nothing is held."""


def test_a_silent_node_is_lost_and_one_that_beats_is_not():
    beating, lost = Beating(), []
    call = FarNode(beating, "10.0.0.7", lost.append).call(1, "run")
    assert beating.is_silent.wait(60)
    assert beating.waits == [module.SILENT_S] * 4  # each beat begins the time anew
    assert (lost, call.done()) == ([], False)
    beating.time_is_over.set()
    with pytest.raises(ConnectionError, match="no word for 12 s"):
        call.result(60)
    assert lost == ["no word for 12 s"]


def test_the_node_is_told_of_the_end_and_hears_beats_until_then(case, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    beating = Case()
    assert beating.far.receive(60.0) == (True, True)
    beating.node.close()
    while (said := beating.far.receive(60.0)) == (True, True):
        pass
    assert said == (False, None)
    wait_until(lambda: beating.lost)
    with pytest.raises(ConnectionError, match="this command ends"):
        beating.node.call(1, "run").result(60)
    beating.far.close()
