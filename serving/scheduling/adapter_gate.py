"""Adapter admission: slots of waiting requests, and the bound of their wait. No jax.

Sequences whose adapter is resident pass those that wait for one. A waiter cannot be passed for
ever: after half of its time, at most 30 s, one busy adapter is drained for it, that is, gets no
more sequences with later deadlines until the waiter has its slot.
"""

import itertools
from collections.abc import Iterable
from typing import Protocol

from serving.api.request import Sequence

_MOST_LOOKED_AT = 256  # waiting sequences in a step
_PATIENCE_S = 30.0  # a waiter is passed by others for so long at most
_LATE_S = 0.1  # from its first miss: so long it comes behind others when its adapter has come


class AdapterResidency(Protocol):
    """The device's adapter slots, as the scheduler sees them. Keys are digests, not names."""

    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user, or None: not resident (yet).

        When it is neither resident nor loading, this starts the load if there is room, for which
        it may evict resident adapters without users. What loads is safe from eviction until the
        next step is planned; a load that takes no time returns the slot at once.
        """
        ...

    def release(self, digest: str) -> None:
        """Count one user less."""
        ...

    def is_loading(self, digest: str) -> bool:
        """True if the adapter has a place and will be resident soon."""
        ...

    def is_resident(self, digest: str) -> bool:
        """True if `acquire` would return a slot."""
        ...

    def protect(self, digests: frozenset[str]) -> None:
        """Evict none of these adapters for another's sake until the next call. That is no use."""
        ...

    def pool_of(self, digest: str) -> str | None:
        """Name the slots that the adapter takes one of; None: nobody may take its place."""
        ...


class NoAdapters:
    """The residency of an engine that serves its base model only."""

    def acquire(self, digest: str) -> int | None:
        raise ValueError(f"This engine serves no adapters, so not {digest[:12]}.")

    def release(self, digest: str) -> None:
        raise ValueError(f"This engine serves no adapters, so not {digest[:12]}.")

    def is_loading(self, digest: str) -> bool:
        return False

    def is_resident(self, digest: str) -> bool:
        return False

    def protect(self, digests: frozenset[str]) -> None:
        del digests

    def pool_of(self, digest: str) -> str | None:
        return None


class AdapterGate:
    """Slots for sequences in order of their deadlines; one thread uses it."""

    def __init__(self, residency: AdapterResidency, wait_s: float):
        self._residency = residency
        self._wait_s, self._patience_s = wait_s, min(wait_s / 2, _PATIENCE_S)
        self._since: dict[Sequence, float] = {}  # first miss of each waiting sequence
        self._users: dict[str, int] = {}
        self._missing: set[str] = set()  # asked for in vain in this round
        self._starving: Sequence | None = None
        self._drained: set[str] = set()
        self._held: frozenset[str] = frozenset()

    def start_round(self) -> None:
        """Begin a walk over the waiting sequences, earliest deadline first."""
        self._missing.clear()

    def enter(self, sequence: Sequence, now: float) -> bool:
        """Give the sequence its adapter's slot if it can run now; base sequences need none."""
        digest = sequence.request.adapter_digest
        if not digest or sequence.slot >= 0:
            return True
        slot = None
        if digest not in self._missing and not self._must_yield(sequence):
            slot = self._residency.acquire(digest)
        if slot is None:
            self._missing.add(digest)
            self._note_miss(sequence, now)
            return False
        self.forget(sequence)
        sequence.slot = slot
        self._users[digest] = self._users.get(digest, 0) + 1
        return True

    def hold(self, waiting: Iterable[Sequence], count: int) -> None:
        """Protect up to `count` resident adapters that nobody uses and sequences wait to use.

        Before this step's loads: a request whose adapter is there may run in this step, and an
        earlier one whose adapter is not would have it evicted. No more than the first ones of a
        long line are looked at. Each stays until the next call, or until its last user leaves.
        """
        held: set[str] = set()
        for sequence in itertools.islice(waiting, _MOST_LOOKED_AT):
            if len(held) >= count:
                break
            digest = sequence.request.adapter_digest
            if sequence.slot >= 0 or not digest or digest in self._users or digest in held:
                continue
            if self._must_yield(sequence):  # others of its adapter may be earlier, in other lines
                continue
            if self._residency.is_resident(digest):
                held.add(digest)
        if held != self._held:
            self._held = frozenset(held)
            self._residency.protect(self._held)

    def leave(self, sequence: Sequence) -> None:
        """Take the slot back from a sequence that has one."""
        if sequence.slot < 0:
            return
        digest = sequence.request.adapter_digest
        sequence.slot = -1
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            if digest in self._held:  # nobody waits to use it first any more
                self._held -= {digest}
                self._residency.protect(self._held)
        self._residency.release(digest)

    def forget(self, sequence: Sequence) -> None:
        """The sequence does not wait for an adapter any more."""
        self._since.pop(sequence, None)
        if sequence is self._starving:
            self._starving = None
            self._drained.clear()

    def is_waiting(self, sequence: Sequence) -> bool:
        """True if an adapter is what the sequence waits for."""
        return sequence in self._since

    def late(self, now: float) -> frozenset[Sequence]:
        """Return sequences whose adapter was first missed less than _LATE_S ago.

        A step takes them last: `prompts_by_tenant`.
        """
        if not self._since:
            return frozenset()
        misses = reversed(self._since.items())  # the last ones first
        return frozenset(s for s, _ in itertools.takewhile(lambda m: now - m[1] < _LATE_S, misses))

    @property
    def is_starving(self) -> bool:
        """True if a sequence has waited so long for an adapter that others make room."""
        return self._starving is not None

    @property
    def blocked(self) -> dict[str, Sequence]:
        """The first sequence of each tenant that waits for an adapter."""
        first: dict[str, Sequence] = {}
        for sequence in self._since:
            earliest = first.setdefault(sequence.tenant, sequence)
            if sequence.order < earliest.order:
                first[sequence.tenant] = sequence
        return first

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences that have waited for their adapter as long as they may."""
        return [seq for seq, since in self._since.items() if now - since >= self._wait_s]

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Raise AssertionError when users and slots disagree with the sequences that hold them."""
        users: dict[str, int] = {}
        for sequence in holders:
            digest = sequence.request.adapter_digest
            assert (sequence.slot >= 0) == bool(digest), f"slot {sequence.slot} of {digest!r}"
            if digest:
                users[digest] = users.get(digest, 0) + 1
        assert users == self._users, f"users {self._users}, sequences say {users}"
        assert self._starving is None or self._starving in self._since, "starving but not waiting"
        assert self._starving is not None or not self._drained, "drained for nobody"

    def _must_yield(self, sequence: Sequence) -> bool:
        return (
            self._starving is not None
            and sequence.request.adapter_digest in self._drained
            and sequence.order > self._starving.order
        )

    def _note_miss(self, sequence: Sequence, now: float) -> None:
        since = self._since.setdefault(sequence, now)
        if now - since < self._patience_s:
            return
        if self._starving is None or sequence.order < self._starving.order:
            self._starving = sequence
            self._drained.clear()
        if sequence is self._starving:
            self._drain_one_more()

    def _drain_one_more(self) -> None:
        """Drain the adapter with the fewest users, unless one is on its way out or ours in."""
        assert self._starving is not None
        digest = self._starving.request.adapter_digest
        if self._residency.is_loading(digest) or any(d in self._users for d in self._drained):
            return
        busy = [d for d in self._users if d != digest and d not in self._drained]
        if busy:
            self._drained.add(min(busy, key=lambda d: (self._users[d], d)))
