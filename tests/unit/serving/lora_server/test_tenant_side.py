"""The engine's books of its tenants: seats, epochs, and whose requests a failed step ends."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.processes.server_process import ROOT

from lora_jax.adapters import reader
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving.api.config import EngineConfig
from serving.lora_server.client import LOCAL
from serving.lora_server.tenant_adapter import layout_of
from serving.lora_server.tenant_side import (
    TenantAccess,
    TenantLink,
    TenantSide,
    digest_of,
    report_of,
)
from serving.lora_server.transport.base import Status, TransportError
from serving.lora_server.whole_side import LOST

MODEL = ROOT / "assets" / "tiny-moe"


class Client:
    """Seats as TenantClient has them, without memory."""

    servers = 2

    def __init__(self):
        self.epochs, self.here = [0, 0], set()

    def sit(self, number, seat, gone):
        self.epochs[number] = seat.epoch
        self.here.add(number)

    def rise(self, number):
        self.here.discard(number)

    def last_epoch(self, number):
        return self.epochs[number]

    def is_lost(self, number):
        return number not in self.here


@pytest.fixture(scope="module")
def report():
    catalogue = model_class(read_config(MODEL).model_type).catalogue(read_config(MODEL))
    return reader.read(MODEL / "adapters" / "law", catalogue).report


@pytest.fixture
def side(report):
    return TenantSide(TenantLink(layout_of(str(MODEL)), Client()), 4)


def sit(side, name, report, epoch):
    side.sit(name, report, SimpleNamespace(epoch=epoch))
    return digest_of(name, report.digest)


def entry(digest):
    return SimpleNamespace(digest=digest)


def test_a_report_survives_its_way_as_json(report):
    assert report_of(json.loads(json.dumps(report.as_json()))) == report


def test_equal_files_of_two_tenants_have_seats_and_digests_of_their_own(side, report):
    first, second = sit(side, "a", report, 1), sit(side, "b", report, 2)
    assert first != second
    assert side.read("a").digest == first
    assert side.read("a").sites == {}
    side.bind(0, first)
    side.bind(1, second)
    numbers, _ = side.take_table()
    assert {number & 255 for number in numbers[:2]} == {0, 1}
    assert list(numbers[2:]) == [LOCAL, LOCAL]
    assert side.take_table() is None
    with pytest.raises(ValueError, match=r"All 2 seats.*max_tenants"):
        sit(side, "c", report, 3)


def test_a_seat_is_anothers_only_when_no_step_can_have_rows_of_its_last(side, report):
    digest = sit(side, "a", report, 1)
    sit(side, "b", report, 2)
    side.retain(entry(digest))
    assert side.leave("a", 1)
    assert side.take_failures() == [(digest, LOST)]
    with pytest.raises(ValueError, match="All 2 seats"):
        sit(side, "c", report, 3)
    side.drop(digest, 7)  # 7 steps were sent by then
    side.collect(6)
    with pytest.raises(ValueError, match="All 2 seats"):
        sit(side, "c", report, 3)
    side.collect(7)
    sit(side, "c", report, 3)
    side.check_integrity()


def test_a_late_leave_does_not_end_the_process_that_came_after(side, report):
    digest = sit(side, "a", report, 1)
    sit(side, "a", report, 2)
    assert not side.leave("a", 1)
    assert side.is_ready(digest)
    with pytest.raises(FileNotFoundError, match="no process serves the adapter 'b'"):
        side.read("b")


def test_a_failed_step_ends_the_requests_of_its_own_tenants_alone(side, report):
    first, second = sit(side, "a", report, 1), sit(side, "b", report, 2)
    side.retain(entry(first))
    side.retain(entry(second))
    assert side.affected_by(np.zeros(2, int)) == frozenset()
    lost = []
    side.on_lost = lambda name, epoch: lost.append((name, epoch))
    assert side.affected_by(np.array([0, Status.REFUSED])) == {second}
    assert lost == []  # it answers
    side.link.client.rise(1)  # as a process that was killed, or did not answer in time
    assert side.affected_by(np.array([0, Status.TIMED_OUT])) == {second}
    assert lost == [("b", 2)]
    assert side.take_failures() == [(second, LOST)]
    assert (side.is_ready(first), side.is_ready(second)) == (True, False)
    assert (side.lost_epoch("a"), side.lost_epoch("b")) == (None, 2)


def test_sizes_out_of_bounds_are_refused_by_name():
    config = EngineConfig(model=str(MODEL))
    with pytest.raises(ValueError, match=r"max_tenants must be in 1\.\.256, got 0"):
        TenantAccess(0, 1.0).open(config, "float32")


def test_a_process_whose_memory_is_refused_has_no_seat(side, report, monkeypatch):
    def refuse(number, seat, gone):
        raise TransportError("the memory of seat 0 cannot be mapped")

    monkeypatch.setattr(side.link.client, "sit", refuse)
    with pytest.raises(TransportError, match="cannot be mapped"):
        sit(side, "a", report, 1)
    monkeypatch.undo()
    assert [sit(side, name, report, 1) for name in ("b", "c")]  # both seats are free
    side.check_integrity()


def test_other_files_under_a_name_take_another_seat_and_free_the_old_one(side, report):
    first = sit(side, "a", report, 1)
    changed = dataclasses.replace(report, digest="f" * 64)
    second = sit(side, "a", changed, 2)
    assert second != first
    assert side.read("a").digest == second
    assert sit(side, "b", report, 3)  # the first one's seat
    side.drop("nobody's", 7)  # of a request that was never kept
    assert not side.is_busy
