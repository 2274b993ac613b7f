"""Short steps: a tenant that holds little gets its next prompt without the rows of a crowd. No jax.

A prompt of some words costs less than the rows of a tenant that floods. In a short step those rows
sit out, so the prompt takes the time it takes alone. Weights still decide: rows that sit out are
charged to the tenant they sit out for, and only a tenant that comes before the crowd has such a
step. One that asks again and again therefore gets its share of the time and no more.
"""

import collections
import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from serving.api.request import Sequence
from serving.scheduling.fair_share import FairShares

# Of its share of rows: a tenant with more has prompts among its own rows in most steps, and a step
# for each of them would cost everybody more than it gains.
_LITTLE = 0.25


@dataclasses.dataclass(frozen=True)
class ShortStep:
    """Tenants whose prompts a step is for, and those whose rows sit out of it; may be empty."""

    callers: frozenset[str] = frozenset()
    crowds: frozenset[str] = frozenset()

    def order(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences in their order, those of a crowd last."""
        return sorted(running, key=lambda sequence: sequence.tenant in self.crowds)

    def charge(self, fair: FairShares, served: frozenset[str], idle_rows: int) -> None:
        """Charge the rows that sat out to the callers whose rows ran."""
        for tenant in served & self.callers:
            fair.charge(tenant, idle_rows / len(served & self.callers))


NOT_SHORT = ShortStep()


def short_step(
    fair: FairShares, running: SequenceOf[Sequence], waiting: Iterable[str], num_rows: int
) -> ShortStep:
    """Return the short step that is due; `waiting` are the tenants with waiting sequences."""
    held = collections.Counter(sequence.tenant for sequence in running)
    asking = {*waiting, *(s.tenant for s in running if s.num_remaining > 1)}
    uses = fair.uses({name: float(held[name]) for name in {*held, *asking}}, num_rows)
    crowds = {name for name in held if held[name] > 1 and uses[name].held > uses[name].share}
    callers = {
        name
        for name in asking - crowds
        if uses[name].held <= _LITTLE * uses[name].share
        and all(fair.comes_before(name, crowd) for crowd in crowds)
    }
    if not (callers and crowds):
        return NOT_SHORT
    return ShortStep(frozenset(callers), frozenset(crowds))
