"""Schedules of faults from a seed, and what each fault does to a cluster."""

import contextlib
import dataclasses
import os
import random
import signal
import time

from fault_cluster import ROLES, START_S, Cluster
from fault_history import Fault

RECOVERY_S = 120.0
INSTANCES, RANKS = ROLES[:2], ROLES[2:]


@dataclasses.dataclass(frozen=True)
class Step:
    """One fault of a schedule: `length_s` of a stop, of slowness, of a full disk."""

    kind: str
    role: str
    length_s: float = 0.0
    after_s: float = 0.0  # behind the step before it, or behind its recovery
    waits: bool = True  # for the recovery from the step before


def schedule(seed: int) -> tuple[Step, ...]:
    """Return one or two faults; every kind and role comes once in twenty seeds or more."""
    choices = random.Random(seed)
    return tuple(_step(choices, seed, place) for place in range(1 + (seed % 3 == 2)))


_FIRST = (  # by seed; the lengths are drawn
    *(("kill", role) for role in ROLES),
    *(("stop", role) for role in ROLES),
    *(("slow", role) for role in ROLES),
    ("disk", "disk"),
    ("disk", "disk"),
    ("restart", "front"),
    ("crash", "front"),
    ("pause", "front"),
    ("kill", "instance 1"),
    ("stop", "instance 0"),
    ("kill", "rank 1"),
)


def _step(choices: random.Random, seed: int, place: int) -> Step:
    number = seed % len(_FIRST) if place == 0 else choices.randrange(13)  # the front goes once
    kind, role = _FIRST[number]
    length = {
        "stop": choices.choice((0.5, 8.0, 15.0)),
        "slow": 3.0,
        "disk": 4.0,
        "pause": 1.5,
    }.get(kind, 0.0)
    waits = place == 0 or choices.random() < 0.5
    return Step(kind, role, length, choices.uniform(0.2, 1.5), waits)


class Harm:
    """Applies the steps of a schedule to a cluster and says what happened when."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self.faults: list[Fault] = []
        self.not_recovered = ""

    def apply(self, steps: tuple[Step, ...]) -> None:
        """Do all steps; return when the cluster is well again, or has not become so."""
        pending: list[tuple[Step, float, float]] = []
        gone: dict[str, int] = {}
        for step in steps:
            if step.waits:
                self._recover(pending, gone)
                pending, gone = [], {}
            time.sleep(step.after_s)
            victim = self._cluster.pid_of(step.role) if step.kind == "kill" else None
            start, end = self._do(step)
            if victim is not None:
                gone[step.role] = victim
            pending.append((step, start, end))
        self._recover(pending, gone)

    def _recover(self, pending: list[tuple[Step, float, float]], gone: dict[str, int]) -> None:
        if not pending:
            return
        if not self._cluster.wait_well(RECOVERY_S, gone):
            self.not_recovered = f"not well {RECOVERY_S:.0f} s after {pending}"
        now = time.monotonic()
        self.faults += [Fault(s.kind, s.role, start, end, now) for s, start, end in pending]

    def _do(self, step: Step) -> tuple[float, float]:
        """Do one step; return when it began and when its cause ended."""
        start = time.monotonic()
        match step.kind:
            case "kill":
                self._signal(step.role, signal.SIGKILL)
            case "stop" | "pause":
                with self._stopped(step.role):
                    time.sleep(step.length_s)
            case "slow":
                while time.monotonic() < start + step.length_s:
                    with self._stopped(step.role):
                        time.sleep(0.06)
                    time.sleep(0.03)
            case "disk":
                self._full_disk(step.length_s)
            case "restart" | "crash":
                self._new_front(crash=step.kind == "crash")
            case _:
                raise ValueError(f"no such fault: {step.kind}")
        return start, time.monotonic()

    def _signal(self, role: str, number: int, pid: int | None = None) -> int | None:
        pid = self._cluster.pid_of(role) if pid is None else pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return pid

    @contextlib.contextmanager
    def _stopped(self, role: str):
        pid = self._signal(role, signal.SIGSTOP)
        try:
            yield
        finally:
            if pid is not None:
                self._signal(role, signal.SIGCONT, pid)

    def _full_disk(self, length_s: float) -> None:
        """Fill the disk, and let an instance die in the middle."""
        self._cluster.fill_disk(True)
        try:
            time.sleep(length_s / 2)
            self._signal(INSTANCES[0], signal.SIGKILL)
            time.sleep(length_s / 2)
        finally:
            self._cluster.fill_disk(False)

    def _new_front(self, *, crash: bool) -> None:
        """End the supervisor and start another, as an init system does."""
        top = self._cluster.top
        top.send_signal(signal.SIGKILL if crash else signal.SIGTERM)
        top.wait(START_S)
        self._cluster.start()
        self._cluster.wait_well(START_S)
