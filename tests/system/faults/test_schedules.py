"""A real cluster under faults: every answer right, every load kept, everybody told in time."""

import time

import pytest
from fault_checker import violations
from fault_clients import FOLDERS, NAMES, Clients, ask_all
from fault_cluster import FIXED, START_S, Cluster
from fault_history import Recorder
from fault_schedules import Harm, schedule

SEEDS = range(20)
QUIET_S = 3.0  # of traffic before the faults, which says how long a request takes alone
MORE_DESCRIPTORS = 16  # connections that are just open

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Shared:
    """One cluster for many schedules; a broken one is replaced."""

    def __init__(self, folder):
        self._folder, self._count = folder, 0
        self.cluster = None

    def get(self) -> Cluster:
        if self.cluster is not None and self.cluster.is_well():
            return self.cluster
        if self.cluster is not None:
            self.cluster.stop()
        self._count += 1
        self.cluster = Cluster(self._folder / f"log-{self._count}")
        assert self.cluster.wait_well(START_S), self.cluster.log.read_text()[-5000:]
        return self.cluster


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    found = Shared(tmp_path_factory.mktemp("cluster"))
    yield found
    if found.cluster is not None:
        found.cluster.stop()


def service_of(operations) -> float:
    """Return how long a request may take without a fault: a multiple of what the longest took."""
    return max(3.0, 4 * max(o.end_s - o.start_s for o in operations))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_of_faults(shared, fault_answers, seed):
    steps = schedule(seed)
    cluster = shared.get()
    recorder = Recorder()
    clients = Clients(cluster, seed, recorder)
    for name in NAMES:  # what the names are is known from here on
        assert clients.load(name, FOLDERS[seed % 4]).status == 200
    before = cluster.descriptors()
    clients.start()
    harm = Harm(cluster)
    try:
        time.sleep(QUIET_S)
        service_s = service_of(recorder.take())
        harm.apply(steps)
        time.sleep(1.5)
    finally:
        clients.stop()
    assert not harm.not_recovered, harm.not_recovered
    ask_all(clients, ("front", "instance 0", "instance 1"))
    fixed = {"base": "base"} | {name: name for name in FIXED}
    operations = recorder.take()
    found = violations(operations, harm.faults, fault_answers, fixed, service_s)
    restarted = any(fault.takes_the_front for fault in harm.faults)
    found += [] if restarted else _more_descriptors(before, cluster)
    said = f"{len(operations)} operations, service {service_s:.1f} s, {harm.faults}"
    assert not found, "\n".join([f"schedule {steps}", said, f"{len(found)}:", *found[:20]])
    assert sum(o.outcome == "answered" for o in operations) > 20


def _more_descriptors(before: dict[str, int], cluster: Cluster) -> list[str]:
    for _ in range(20):
        now = cluster.descriptors()
        more = [
            f"{role} holds {count} descriptors, {before[role]} before"
            for role, count in now.items()
            if count > before.get(role, count) + MORE_DESCRIPTORS
        ]
        if not more:
            return []
        time.sleep(0.5)
    return more


def test_nothing_is_left_behind(shared):
    """The last: the cluster that went through all schedules ends as any other."""
    cluster = shared.get()
    shared.cluster = None
    assert cluster.stop() == []
