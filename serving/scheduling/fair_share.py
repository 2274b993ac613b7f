"""The order between tenants: start-time fair queueing over tokens. Policy only: no jax.

Each tenant has a virtual time, the tokens computed for it divided by its weight. The tenant with
the lowest one comes next. A tenant that begins to wait starts at the clock, which is the virtual
time of whoever came last, so that nobody saves up time while asking for nothing. Whatever is free
is given away: a tenant alone has everything, and the order is then that of its sequences.

Rows and pages are held for as long as a sequence runs. A tenant below its share of them may
therefore claim some from a tenant beyond its share (`victim`), by preemption.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from serving.api.request import Share


@dataclasses.dataclass(eq=False)
class _Tenant:
    share: Share
    time: float  # virtual
    live: int = 0  # sequences
    rows: int = 0  # sequences that run


@dataclasses.dataclass(frozen=True)
class Use:
    """Holdings of a tenant, and the part that is its share."""

    held: float
    share: float


class FairShares:
    """Virtual times and shares of the tenants that have live sequences."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._clock = 0.0

    @property
    def are_shared(self) -> bool:
        """True if more than one tenant has live sequences."""
        several = len(self._tenants) > 1
        return several and sum(tenant.live > 0 for tenant in self._tenants.values()) > 1

    def enter(self, share: Share, count: int, *, begins: bool) -> None:
        """Take in `count` more live sequences; `begins`: nothing of the tenant waited before."""
        tenant = self._tenants.setdefault(share.tenant, _Tenant(share, self._clock))
        tenant.share = share  # the newest: keys may be read again
        tenant.live += count
        if begins:
            tenant.time = max(tenant.time, self._clock)

    def leave(self, name: str) -> None:
        """Let one live sequence go, and forget what cannot matter any more."""
        self._tenants[name].live -= 1
        if not any(tenant.live for tenant in self._tenants.values()):
            self._tenants.clear()
            self._clock = 0.0

    def start(self, name: str) -> None:
        """Count one more running sequence."""
        self._tenants[name].rows += 1

    def stop(self, name: str) -> None:
        """Count one running sequence less."""
        self._tenants[name].rows -= 1

    def charge(self, name: str, tokens: float) -> None:
        """Advance the tenant's virtual time by tokens that a step computes for it."""
        tenant = self._tenants[name]
        tenant.time += tokens / tenant.share.weight

    def first(self, names: Iterable[str]) -> str:
        """Return the tenant that comes next, and set the clock to its time."""
        name = min(names, key=self._rank) if len(self._tenants) > 1 else next(iter(names))
        self._clock = max(self._clock, self._tenants[name].time)
        return name

    def settle(self) -> None:
        """Set the clock where nothing waits, so that the next tenant begins level with others."""
        self._clock = max([self._clock, *(t.time for t in self._tenants.values() if t.live)])

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Return the tenants in the order in which they come."""
        return sorted(names, key=self._rank)

    def comes_before(self, name: str, other: str) -> bool:
        """Return whether `name` has had no more than `other`."""
        return self._tenants[name].time <= self._tenants[other].time

    def may_run_more(self, name: str, rows: int | None = None) -> bool:
        """Return whether the tenant's own limit lets a sequence run beside `rows` (None: all)."""
        tenant = self._tenants[name]
        running = tenant.rows if rows is None else rows
        return tenant.share.max_running is None or running < tenant.share.max_running

    def share_of(self, share: Share, total: float) -> float:
        """Return the tenant's part of `total` beside the tenants that have live sequences."""
        others = sum(
            tenant.share.weight
            for name, tenant in self._tenants.items()
            if tenant.live and name != share.tenant
        )
        return total * share.weight / (others + share.weight)

    def uses(self, held: Mapping[str, float], total: float) -> dict[str, Use]:
        """Return what each tenant holds of `total`, beside its share."""
        return {name: self.own_use(name, held, total) for name in held}

    def own_use(self, name: str, held: Mapping[str, float], total: float) -> Use:
        """Return what one tenant holds, which may be nothing."""
        share = self.share_of(self._tenants[name].share, total)
        return Use(held.get(name, 0.0), share)

    def check_integrity(self, live: Mapping[str, int], rows: Mapping[str, int]) -> None:
        """Raise AssertionError when the counts disagree with the sequences."""
        counted = {name: t.live for name, t in self._tenants.items() if t.live}
        assert counted == live, f"live {counted}, sequences say {live}"
        running = {name: t.rows for name, t in self._tenants.items() if t.rows}
        assert running == rows, f"running {running}, sequences say {rows}"

    def _rank(self, name: str) -> tuple[float, int]:
        tenant = self._tenants[name]
        return tenant.time, tenant.rows


def may_claim(own: Use, more: float) -> bool:
    """Return whether a tenant may take `more` from others: within its share, or as its first."""
    return not own.held or own.held + more <= own.share


def victim(uses: Mapping[str, Use], claimant: str, counts: Mapping[str, int]) -> str | None:
    """Return the tenant farthest beyond its share that can give a sequence back, if there is one.

    `counts` are running sequences: a tenant's last one is never taken. What claims stays within
    its share and what gives is beyond it, so two tenants cannot take the same thing in turn.
    """
    beyond = {
        name: use.held / use.share
        for name, use in uses.items()
        if name != claimant and counts.get(name, 0) > 1 and use.held > use.share
    }
    return max(beyond, key=lambda name: (beyond[name], name), default=None)
