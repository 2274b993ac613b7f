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
def case():
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


def test_a_silent_node_is_lost_and_one_that_beats_is_not(monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.3)
    case, told = Case(), threading.Event()

    def beat():
        while not told.wait(0.02):
            case.far.beat(serving=True)

    thread = threading.Thread(target=beat)
    thread.start()
    call = case.node.call(1, "run")
    with pytest.raises(TimeoutError):
        call.result(0.6)
    assert not case.lost
    told.set()
    thread.join()
    with pytest.raises(ConnectionError, match=r"no word for 0\.3 s"):
        call.result(60)
    case.far.close()


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
