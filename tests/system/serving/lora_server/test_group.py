"""A group that cannot start leaves nothing; one that runs is in test_processes.py."""

import os
import types

import pytest
from support.cases import lora_server_cases as cases
from support.waiting import wait_until

from serving.lora_server import group
from serving.lora_server.group import ServerGroup
from serving.lora_server.transport.selection import RankPlace
from serving.runtime.child_process import Pulse
from serving.runtime.role_host import OneHost


class Process:
    """A rank that never comes up, without the cost of a process."""

    made = ()

    def __init__(self, spec, rank, place, gpu, host):
        self.rank, self.path, self.control, self.stopped = rank, place.address, None, False
        self.gpu, self.place, self.host = gpu, place, host
        self.sentinel, self._end = os.pipe()
        self.is_ready, self.pid = False, os.getpid()
        Process.made = (*Process.made, self)

    def wait_ready(self):
        raise ConnectionError(f"rank {self.rank} has gone")

    def open(self):
        host, port = self.place.address
        self.place = RankPlace((host, port or 7000 + len(Process.made)), self.place.secret)

    def pulse(self, limit_s):
        return Pulse.UP

    def end_by_signal(self):
        return ""

    def kill(self):
        end, self._end = self._end, None
        if end is not None:
            os.close(end)

    def stop(self, end_s=None):
        self.kill()
        if not self.stopped:
            os.close(self.sentinel)
        self.stopped = True


class Running(Process):
    """A rank that comes up at once."""

    def wait_ready(self):
        self.is_ready = True


class Hosts(OneHost):
    """One other host for every rank, whose address changes."""

    def __init__(self):
        self.host = types.SimpleNamespace(address="10.0.0.1")

    def server_rank(self, rank):
        return self.host


def has_come(made, count):
    """Return whether the group has the process in place that was made as number `count`."""
    return (
        len(Process.made) == count
        and made.processes == [Process.made[-1]]
        and made.processes[0].is_ready
    )


def test_a_group_whose_ranks_cannot_start_leaves_nothing(monkeypatch):
    monkeypatch.setattr(group, "RankProcess", Process)
    monkeypatch.setattr(Process, "made", ())
    with pytest.raises(ConnectionError, match="has gone"):
        ServerGroup(cases.make_spec("nowhere", "ep2-pp1"), first_gpu=3)
    assert len(Process.made) == 2
    assert all(process.stopped for process in Process.made)
    assert [process.gpu for process in Process.made] == [3, 4]
    assert len({process.path for process in Process.made}) == 2
    assert not os.path.exists(os.path.dirname(Process.made[0].path))


def test_a_rank_on_another_host_keeps_its_address_or_instances_are_told(monkeypatch):
    monkeypatch.setattr(group, "RankProcess", Running)
    monkeypatch.setattr(Process, "made", ())
    hosts, moved = Hosts(), []
    made = ServerGroup(cases.make_spec("nowhere", "ep1-pp1"), 0, hosts, lambda: moved.append(1))
    made.coordinator.restore = lambda rank, control: None
    (place,) = made.places
    assert place.address == ("10.0.0.1", 7001)
    assert len(place.secret) == 32
    for address, is_told in (("10.0.0.1", False), ("10.0.0.2", True)):
        hosts.host = types.SimpleNamespace(address=address)
        count = len(Process.made)
        made.processes[0].kill()
        wait_until(lambda count=count: has_come(made, count + 1))
        wait_until(lambda is_told=is_told: len(moved) == is_told)
        assert made.places[0].address[0] == address
    assert made.places[0].address == ("10.0.0.2", 7003)
    made.close()


def test_a_rank_that_has_no_host_or_cannot_be_restarted_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(group, "RankProcess", Running)
    monkeypatch.setattr(group, "_RESTART_S", 0.01)
    monkeypatch.setattr(Process, "made", ())
    hosts, failures = Hosts(), [ValueError("the shard is of another model")]
    made = ServerGroup(cases.make_spec("nowhere", "ep1-pp1"), 0, hosts, lambda: None)
    place = hosts.host

    refusals = ["Ray has found no room"] * 3

    def server_rank(rank):
        if not refusals:
            return place  # there again
        raise ConnectionError(refusals.pop())

    def restore(rank, control):
        if failures:
            raise failures.pop()

    hosts.server_rank, made.coordinator.restore = server_rank, restore
    made.processes[0].kill()
    wait_until(lambda: has_come(made, 3))
    assert caplog.text.count("Rank 0 of the LoRA Server has no host: Ray has found no room") == 1
    assert caplog.text.count("has ended; restarting it") == 2  # and of the one that failed
    assert "could not be restarted: the shard is of another model" in caplog.text
    made.close()
