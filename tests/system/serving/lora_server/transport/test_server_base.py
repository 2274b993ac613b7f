"""Server handling of its clients, for any kind of slot memory."""

import numpy as np
import pytest
from support.cases.transport_cases import terms_of

from serving.lora_server.transport.base import Request
from serving.lora_server.transport.server_base import AbstractServerBase
from serving.lora_server.transport.shapes import GATE_UP

SHAPES = terms_of(ep=1).shapes
SITE = SHAPES.sites[GATE_UP]


class Server(AbstractServerBase[str]):
    """Keeps what is done to it."""

    def __init__(self, shapes):
        super().__init__(shapes)
        self.done = []
        self._seats = {1: "one", 4: "four"}

    def abort(self):
        self._aborted = True

    def _answer(self, request, deltas):
        self.done.append(deltas)
        return request.client in self._seats

    def _free(self):
        assert self._lock.locked()
        self.done.append("freed")

    receive = dropped = None


def request_of(rows, client=1):
    x, ids = np.zeros((8, SITE.d_in), np.float32), np.zeros(8, np.int32)
    return Request(client, 1, 1, 0, GATE_UP, rows, 0, x, ids, ids)


def test_it_closes_once_with_what_hangs_on_it():
    server = Server(SHAPES)
    server.on_close(lambda: server.done.append("first"))
    assert server.clients() == (1, 4)
    assert not server.aborted()
    server.close()
    server.close()
    assert server.done == ["first", "freed"]
    assert server.aborted()
    assert server.clients() == ()


def test_answers_are_cut_to_the_rows_that_were_asked_for():
    server = Server(SHAPES)
    wide = [np.arange(5 * w, dtype=np.float32).reshape(w, 5).T for w in SITE.d_outs]
    assert server.respond(request_of(3), wide)
    assert not server.respond(request_of(3, client=2), wide)
    for got, want in zip(server.done[0], wide, strict=True):
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, want[:3])
    assert server.refuse(request_of(3))
    assert server.done[-1] is None


def test_answers_that_do_not_fit_are_refused():
    server = Server(SHAPES)
    good = [np.zeros((3, width), np.float32) for width in SITE.d_outs]
    for bad in (good[0][:2], good[0][:, 1:], good[0].astype(np.float64), good[0][0]):
        with pytest.raises(ValueError, match=f"output 0 of {SITE.name} must be float32"):
            server.respond(request_of(3), [bad, *good[1:]])
    with pytest.raises(ValueError, match="outputs, got 0"):
        server.respond(request_of(3), [])
    assert not server.done


def test_one_clients_epoch_moves_no_others():
    server = Server(SHAPES)
    assert [server._next_epoch(last) for last in (0, 0, 1 << 60, 0, 7, 5)] == [
        1,
        2,
        (1 << 60) + 1,
        4,
        8,
        6,
    ]
