"""Claims of adapter slots: one tenant's adapters do not keep another's off the device. No jax.

Slots are held for as long as any sequence uses the adapter. A tenant below its share of the slots
in use, whose adapter finds none, takes one from a tenant beyond its share: the sequences of that
adapter are sent back to waiting. A slot that several tenants use counts in parts for each, and is
not taken.
"""

import collections
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from serving.api.request import Sequence
from serving.scheduling.adapter_gate import AdapterGate, AdapterResidency
from serving.scheduling.fair_share import FairShares, may_claim, victim

_AGAIN_S = 0.25  # a slot that was given up may need some steps to become free


class SlotClaim(NamedTuple):
    """A waiting sequence, and those that give up their adapter's slot for it."""

    claimant: Sequence
    yielding: list[Sequence]


class SlotClaims:
    """Finds the claims; the scheduler sends sequences back. One thread uses it."""

    def __init__(self, fair: FairShares, gate: AdapterGate, residency: AdapterResidency):
        self._fair, self._gate, self._residency = fair, gate, residency
        self._last: dict[str, float] = {}  # time of each tenant's last claim

    def due(self, sequences: Iterable[Sequence], now: float) -> list[SlotClaim]:
        """Return this step's claims among all live sequences, at most one a tenant.

        Adapters that have become resident are first given to those who wait for them.
        """
        self._gate.start_round()
        for tenant in self._fair.ordered(blocked := self._gate.blocked):
            self._gate.enter(blocked[tenant], now)
        blocked = self._gate.blocked
        if not blocked:
            return []
        self._gate.start_round()
        users: dict[str, list[Sequence]] = collections.defaultdict(list)
        for sequence in sequences:
            if sequence.slot >= 0:
                users[sequence.request.adapter_digest].append(sequence)
        self._last = {name: at for name, at in self._last.items() if now - at < _AGAIN_S}
        claims = (self._claim(blocked[t], users, now) for t in self._fair.ordered(blocked))
        return [claim for claim in claims if claim is not None]

    def _claim(
        self, claimant: Sequence, users: dict[str, list[Sequence]], now: float
    ) -> SlotClaim | None:
        tenant, digest = claimant.tenant, claimant.request.adapter_digest
        if tenant in self._last or self._residency.is_loading(digest):
            return None
        pool = self._residency.pool_of(digest)
        taken = self._taken(tenant, {d: u for d, u in users.items() if self._is_of(d, pool)})
        if taken is None:
            return None
        self._last[tenant] = now
        return SlotClaim(claimant, users.pop(taken))

    def _is_of(self, digest: str, pool: str | None) -> bool:
        return pool is not None and self._residency.pool_of(digest) == pool

    def _taken(self, tenant: str, users: Mapping[str, list[Sequence]]) -> str | None:
        """Return the adapter whose slot the tenant may take: the one with the fewest sequences."""
        held: dict[str, float] = collections.defaultdict(float)
        counts: collections.Counter[str] = collections.Counter()
        alone: dict[str, list[str]] = collections.defaultdict(list)  # what one tenant alone uses
        for digest, sequences in users.items():
            tenants = {sequence.tenant for sequence in sequences}
            for name in tenants:
                held[name] += 1 / len(tenants)
                counts[name] += 1
            if len(tenants) == 1:
                alone[tenants.pop()].append(digest)
        if not may_claim(self._fair.own_use(tenant, held, len(users)), 1):
            return None
        may_give = {name: counts[name] for name in alone}
        chosen = victim(self._fair.uses(held, len(users)), tenant, may_give)
        if chosen is None:
            return None
        return min(alone[chosen], key=lambda digest: (len(users[digest]), digest))
