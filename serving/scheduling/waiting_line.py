"""The sequences that wait, by tenant, each tenant's in order of their deadlines. No jax."""

import bisect
import itertools
from collections.abc import Container, Iterable, Iterator

from serving.api.request import Sequence


class WaitingLine:
    """Sorted lists of waiting sequences; a tenant without any is not kept."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain.from_iterable(self._lines.values())

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its deadline says."""
        line = self._lines.setdefault(sequence.tenant, [])
        bisect.insort(line, sequence, key=order_of)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which must be there."""
        line = self._lines[sequence.tenant]
        take_out(line, sequence)
        self._count -= 1
        if not line:
            del self._lines[sequence.tenant]

    def of(self, tenant: str) -> list[Sequence]:
        """Return a copy of a tenant's line."""
        return list(self._lines.get(tenant, ()))

    def count(self, tenant: str) -> int:
        """Return how many sequences of a tenant wait."""
        return len(self._lines.get(tenant, ()))

    @property
    def tenants(self) -> list[str]:
        """The tenants with waiting sequences, in order of their first arrival."""
        return list(self._lines)

    def check_integrity(self) -> None:
        """Raise AssertionError when a line is out of order or empty, or the count is wrong."""
        for tenant, line in self._lines.items():
            assert line == sorted(line, key=order_of), "a line is not in order of deadline"
            assert line, f"an empty line of {tenant!r}"
            assert all(sequence.tenant == tenant for sequence in line), "in another's line"
        assert self._count == sum(map(len, self._lines.values())), "waiting miscounted"


def order_of(sequence: Sequence) -> tuple[int, float, int]:
    """Return where a sequence stands among those of its tenant."""
    return sequence.order


def take_out(queue: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a sorted list, which must hold it."""
    if queue[-1] is sequence:
        queue.pop()
        return
    index = bisect.bisect_left(queue, sequence.order, key=order_of)
    assert queue[index] is sequence, "the sequence is not where its deadline says"
    del queue[index]


def prompts_by_tenant(
    running: Iterable[Sequence], waiting: WaitingLine, late: Container[Sequence] = frozenset()
) -> dict[str, Iterator[Sequence]]:
    """Return each tenant's sequences that a step may compute prompts of, in their order.

    Of those that wait the `late` ones come last; where the shortest job comes first, only behind
    jobs of their size.
    """
    begun: dict[str, list[Sequence]] = {}
    for sequence in running:
        if sequence.num_remaining > 1:
            begun.setdefault(sequence.tenant, []).append(sequence)
    tenants = dict.fromkeys([*begun, *waiting.tenants])
    lines = {t: waiting.of(t) for t in tenants}
    return {
        t: itertools.chain(begun.get(t, ()), late_last(line, late) if late else line)
        for t, line in lines.items()
    }


def late_last(line: list[Sequence], late: Container[Sequence]) -> Iterator[Sequence]:
    """Yield a line with the late ones behind others of their size; no more than is asked for."""
    for _, jobs in itertools.groupby(line, key=lambda sequence: sequence.job_tokens):
        behind = []
        for sequence in jobs:
            if sequence in late:
                behind.append(sequence)
            else:
                yield sequence
        yield from behind
