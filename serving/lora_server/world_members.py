"""Members of the worlds of a LoRA Server, as their supervisor sees them: together or not at all.

A world (transport.world) takes nobody back. When a member starts anew another world begins: the
processes of all other members are killed, and their keepers start them for the new one. No jax.
"""

import collections
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from serving.lora_server.transport.world import World

logger = logging.getLogger(__name__)

_ENDED = "Another member has ended meanwhile: all of them start anew."


class Process(Protocol):
    """What is used of a member's process."""

    def kill(self) -> None: ...


@dataclasses.dataclass
class _Now:
    """The world that members start for."""

    number: int
    entered: set[str] = dataclasses.field(default_factory=set)
    addresses: dict[str, str | None] = dataclasses.field(default_factory=dict)
    processes: list[Process] = dataclasses.field(default_factory=list)
    listening: int = 0  # ranks
    id: bytes = b""


class WorldMembers:
    """One world after the other. Any thread may call; waits end when their world does."""

    def __init__(self, ranks: int, instances: int):
        self._ranks, self._instances = ranks, instances
        self._changed = threading.Condition()
        self._now = _Now(0)
        self._closed = False

    def enter(self, member: str) -> int:
        """Return the number of the world for which a member starts.

        It is a new one if the member was in the last one already; then the others are killed.
        """
        with self._changed:
            now, before = self._now, list[Process]()
            if member in now.entered:
                logger.warning("%s has left the NVSHMEM world; all members restart.", member)
                now, before = _Now(now.number + 1), now.processes
                self._now = now
            now.entered.add(member)  # whatever a kill raises
            for process in before:
                _kill(process)
            self._changed.notify_all()
            return now.number

    def leave(self, number: int, member: str) -> None:
        """Forget a member that has no process yet: there is no host for it."""
        with self._changed:
            if self._now.number == number:
                self._now.entered.discard(member)

    def place(self, number: int, member: str, address: str | None) -> None:
        """Report on which host a member will be; None: this one."""
        with self._changed:
            if self._now.number == number:
                self._now.addresses[member] = address
                self._changed.notify_all()

    def hold(self, number: int, process: Process) -> None:
        """Report the process of a member, which ends with its world."""
        with self._changed:
            if self._now.number == number and not self._closed:
                self._now.processes.append(process)
                return
        _kill(process)

    def is_one_host(self, number: int) -> bool:
        """Return whether all members are on one host, once all are placed.

        Raises ConnectionError when the world has ended, and where the hosts have different numbers
        of members: NVSHMEM has no such worlds.
        """
        size = self._ranks + self._instances
        counts = collections.Counter(
            self._wait(number, lambda now: len(now.addresses) == size).addresses.values()
        )
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{count} on {address}" for address, count in sorted(counts.items()))
            raise ConnectionError(
                f"NVSHMEM needs the same number of processes on every host, and there are {told} "
                f"({self._instances} instances and {self._ranks} ranks of the LoRA Server): change "
                "--data-parallel-size, --lora-server or the hosts, or choose another "
                "--lora-server-transport."
            )
        return len(counts) == 1

    def report_listening(self, number: int, world: bytes = b"") -> None:
        """Report that a rank listens; that of PE 0 reports the world's id with it."""
        with self._changed:
            if self._now.number == number:
                self._now.listening += 1
                self._now.id = self._now.id or world
                self._changed.notify_all()

    def world(self, number: int) -> World:
        """Return the world to join, once all ranks listen.

        Raises ConnectionError when it has ended.
        """
        one_host = self.is_one_host(number)
        now = self._wait(number, lambda now: bool(now.id) and now.listening == self._ranks)
        return World(now.id, self._ranks, self._instances, one_host)

    def close(self) -> None:
        """End all waits; later ones end at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, number: int, is_reached: Callable[[_Now], bool]) -> _Now:
        with self._changed:
            while not self._closed and self._now.number == number:
                if is_reached(self._now):
                    return self._now
                self._changed.wait()
        raise ConnectionError(_ENDED)


def rank_member(rank: int) -> str:
    """Return the name of a rank's member."""
    return f"Rank {rank} of the LoRA Server"


def instance_member(number: int) -> str:
    """Return the name of an instance's member."""
    return f"Instance {number}"


def _kill(process: Process) -> None:
    # Its handle is closed, or just being closed: it has ended.
    with contextlib.suppress(ValueError, AttributeError):
        process.kill()
