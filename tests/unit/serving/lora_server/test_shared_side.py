"""The engine's books of adapters in one other process: numbers, sites, and what has ended."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from support.processes.server_process import ROOT

from lora_jax.adapters import reader
from serving.lora_server import shared_side
from serving.lora_server.client import LOCAL
from serving.lora_server.shared_side import NUMBER_BITS, SharedLink, SharedSide
from serving.lora_server.transport.base import Status, TransportError
from serving.lora_server.whole_layout import WholeLayout
from serving.lora_server.whole_side import LOST

MODEL = ROOT / "assets" / "tiny-moe"


class Client:
    """A client of one process, without memory."""

    servers = 1

    def __init__(self):
        self.here, self.joins, self.comes = False, 0, True

    def lost(self):
        return () if self.here else (0,)

    def rejoin(self):
        self.joins += 1
        self.here = self.comes
        return self.lost()


@pytest.fixture(scope="module")
def layout():
    return WholeLayout(str(MODEL))


@pytest.fixture(scope="module")
def report(layout):
    return reader.read(MODEL / "adapters" / "law", layout.catalogue).report


@pytest.fixture
def side(layout):
    made = SharedSide(SharedLink(layout, Client()), 4)
    made.freed = []
    made.on_free = made.freed.append
    return made


def entry(digest):
    return SimpleNamespace(digest=digest)


def test_a_slots_number_says_adapter_and_sites(side, report):
    first = side.sit("a", report, 5, 1, 1)
    attention = {n: m for n, m in report.modules.items() if n in ("q_proj", "v_proj")}
    second = side.sit("b", dataclasses.replace(report, modules=attention), 6, 2, 1)
    assert first != second
    side.bind(0, first)
    side.bind(1, second)
    numbers, version = side.take_table()
    low = (1 << NUMBER_BITS) - 1
    assert [int(n) & low for n in numbers[:2]] == [5, 6]
    site = side.link.layout.site(("q_proj", "k_proj", "v_proj"))
    assert [int(n) >> NUMBER_BITS for n in numbers[:2]] == [0b1111, 1 << site]
    assert (list(numbers[2:]), version) == ([LOCAL, LOCAL], 0)
    assert side.take_table() is None
    assert side.read("a").sites == {}


def test_a_number_is_free_when_no_step_can_have_rows_of_it(side, report):
    digest = side.sit("a", report, 5, 1, 1)
    side.retain(entry(digest))
    assert not side.leave("a", 9)  # of another epoch
    assert side.leave("a", 1)
    assert side.take_failures() == [(digest, LOST)]
    side.drop(digest, 7)
    side.collect(6)
    assert side.freed == []
    side.collect(7)
    assert side.freed == [5]
    side.check_integrity()


def test_an_adapter_that_comes_again_has_another_digest(side, report):
    first = side.sit("a", report, 5, 1, 1)
    second = side.sit("a", report, 6, 2, 1)
    assert first != second
    assert (side.is_ready(first), side.is_ready(second)) == (False, True)
    assert side.freed == [5]


def test_with_the_process_all_requests_of_adapters_end(side, report):
    first, second = side.sit("a", report, 5, 1, 1), side.sit("b", report, 6, 2, 1)
    side.retain(entry(first))
    assert side.affected_by(np.zeros(1, int)) == frozenset()
    lost = []
    side.on_lost = lambda name, epoch: lost.append((name, epoch))
    assert side.affected_by(np.array([Status.REFUSED])) == {first}
    assert (side.lost_epoch("a"), side.is_lost, lost) == (None, False, [])
    side.link.client.here = False
    assert side.affected_by(np.array([Status.TIMED_OUT])) == {first}
    assert lost == [("a", 1), ("b", 2)]
    assert side.take_failures() == [(first, LOST)]
    assert (side.is_ready(first), side.is_ready(second)) == (False, False)
    assert (side.lost_epoch("a"), side.lost_epoch("b")) == (1, 2)
    assert side.is_busy


def test_a_process_that_comes_back_does_not_have_what_the_one_before_had(side, report):
    """Else rows under numbers that it does not know would have it refuse others' with them."""
    first, second = side.sit("a", report, 5, 1, 1), side.sit("b", report, 6, 2, 1)
    side.retain(entry(first))
    side.link.client.here = False
    again = side.sit("b", report, 7, 3, 2)  # before the agent lets "a" leave
    assert (side.is_ready(first), side.is_ready(second), side.is_ready(again)) == (0, 0, 1)
    assert (side.lost_epoch("a"), side.lost_epoch("b")) == (1, None)
    assert side.take_failures() == [(first, LOST)]
    assert side.freed == [6]
    side.drop(first, 1)
    assert side.leave("a", 1)
    side.collect(1)
    assert side.freed == [6, 5]
    side.check_integrity()


def test_an_answer_of_a_process_that_has_ended_waits_for_nothing(side, report):
    side.sit("a", report, 5, 1, 2)
    with pytest.raises(TransportError, match="has ended, and there is a new one"):
        side.sit("b", report, 6, 2, 1)
    assert side.link.client.joins == 1


def test_the_engine_comes_to_each_process_once(side, report, monkeypatch):
    side.sit("a", report, 5, 1, 1)
    side.sit("b", report, 6, 2, 1)
    assert side.link.client.joins == 1
    monkeypatch.setattr(shared_side, "_LOSS_S", 0.01)
    with pytest.raises(TransportError, match="did not see the adapters' process end"):
        side.sit("a", report, 7, 3, 2)
    side.link.client.here = False
    side.sit("a", report, 7, 3, 2)
    assert side.link.client.joins == 2
    side.link.client.here = side.link.client.comes = False
    monkeypatch.setattr(shared_side, "_JOIN_S", 0.01)
    with pytest.raises(TransportError, match="did not answer"):
        side.sit("c", report, 8, 4, 3)
    with pytest.raises(FileNotFoundError, match="no process serves the adapter 'c'"):
        side.read("c")
