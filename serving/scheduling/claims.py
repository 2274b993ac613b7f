"""Claims: running sequences that yield rows and pages to a tenant below its share. No jax."""

import collections
from collections.abc import Collection, Iterable

from serving.api.request import Sequence
from serving.scheduling.fair_share import FairShares, may_claim, victim


def decode_order(running: Collection[Sequence], fair: FairShares, num_pages: int) -> list[Sequence]:
    """Return what runs; where pages are short, the last one gives its own to those before it.

    Tenants that hold least of their share come first, each one's sequences in their order.
    """
    held: collections.Counter[str] = collections.Counter()
    for sequence in running:
        held[sequence.tenant] += len(sequence.pages)
    uses = fair.uses(held, num_pages)
    return sorted(running, key=lambda s: uses[s.tenant].held / uses[s.tenant].share)


class Claims:
    """The claims of one step, over what runs before it. It decides; the scheduler preempts."""

    def __init__(
        self,
        fair: FairShares,
        running: Iterable[Sequence],
        *,
        rows: int,
        free_rows: int,
        pages: int,
        free_pages: int,
    ):
        self._fair, self._rows, self._num_pages = fair, rows, pages
        self._running: dict[str, list[Sequence]] = {}
        for sequence in running:
            self._running.setdefault(sequence.tenant, []).append(sequence)
        self._held_rows = {
            tenant: float(len(sequences)) for tenant, sequences in self._running.items()
        }
        self._held_pages = {
            tenant: float(sum(len(sequence.pages) for sequence in sequences))
            for tenant, sequences in self._running.items()
        }
        self._free_rows, self._free_pages = free_rows, free_pages

    @property
    def are_possible(self) -> bool:
        """True if any tenant is so far beyond its share that others may claim from it."""
        held = (self._held_rows, self._rows), (self._held_pages, self._num_pages)
        return any(victim(self._fair.uses(h, total), "", self._counts) for h, total in held)

    @property
    def _counts(self) -> dict[str, int]:
        return {tenant: len(sequences) for tenant, sequences in self._running.items()}

    def may_run(self, tenant: str) -> bool:
        """Return whether one more row is within the tenant's share and its own limit."""
        use = self._fair.own_use(tenant, self._held_rows, self._rows)
        return self._fair.may_run_more(tenant, int(use.held)) and may_claim(use, 1)

    def make_room(self, tenant: str, pages: int) -> list[Sequence]:
        """Return what is to be preempted so that a sequence of `pages` pages gets in.

        That may be less than it needs: then it has to wait for the rest.
        """
        taken = []
        while self._free_rows < 1 and self._take(tenant, self._held_rows, self._rows, taken):
            pass
        use = self._fair.own_use(tenant, self._held_pages, self._num_pages)
        while (
            may_claim(use, pages)
            and self._free_pages < pages + sum(self._counts.values())
            and self._take(tenant, self._held_pages, self._num_pages, taken)
        ):
            pass
        self._free_rows -= 1
        self._free_pages -= pages
        self._held_rows[tenant] = self._held_rows.get(tenant, 0) + 1
        self._held_pages[tenant] = self._held_pages.get(tenant, 0) + pages
        return taken

    def _take(self, tenant: str, held: dict[str, float], total: int, taken: list) -> bool:
        """Take the last sequence of the tenant farthest beyond its share of `held`."""
        victim_tenant = victim(self._fair.uses(held, total), tenant, self._counts)
        if victim_tenant is None or not self._fair.comes_before(tenant, victim_tenant):
            return False
        sequence = self._running[victim_tenant].pop()
        self._held_rows[victim_tenant] -= 1
        self._held_pages[victim_tenant] -= len(sequence.pages)
        self._free_rows += 1
        self._free_pages += len(sequence.pages)
        taken.append(sequence)
        return True
