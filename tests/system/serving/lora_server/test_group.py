"""A group that cannot start leaves nothing; one that runs is in test_processes.py."""

import os

import pytest
from support.cases import lora_server_cases as cases

from serving.lora_server import group
from serving.lora_server.group import ServerGroup


class Process:
    """A rank that never comes up, without the cost of a process."""

    made = ()

    def __init__(self, spec, rank, place, gpu, host):
        self.rank, self.path, self.control, self.stopped = rank, place.address, None, False
        self.gpu = gpu
        Process.made = (*Process.made, self)

    def wait_ready(self):
        raise ConnectionError(f"rank {self.rank} has gone")

    def stop(self, end_s=None):
        self.stopped = True


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
