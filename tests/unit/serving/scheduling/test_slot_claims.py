"""Slots go from who holds too many to who holds too few, of one pool, and not too often."""

import pytest

from serving.api.request import Request, Sequence, SequenceState, Share
from serving.api.sampling import Sampling
from serving.scheduling.adapter_gate import AdapterGate
from serving.scheduling.fair_share import FairShares
from serving.scheduling.slot_claims import SlotClaims


class Residency:
    """Adapters named in `resident` have slots; E... are of another pool, P... are pinned."""

    def __init__(self, resident: str):
        self.resident, self.loading = set(resident), set()

    def acquire(self, digest):
        return 1 if digest in self.resident else None

    def release(self, digest):
        pass

    def is_loading(self, digest):
        return digest in self.loading

    def pool_of(self, digest):
        return None if digest == "P" else "esft" if digest == "E" else "lora"


class Case:
    def __init__(self, held: dict[str, str], blocked: dict[str, str]):
        """Tenants' adapters, a letter each."""
        self.residency = Residency("".join(held.values()))
        self.gate = AdapterGate(self.residency, 60.0)
        self.fair, self.sequences = FairShares(), []
        self.claims = SlotClaims(self.fair, self.gate, self.residency)
        for tenant, adapters in [*held.items(), *blocked.items()]:
            for digest in adapters:
                self.add(tenant, digest)

    def add(self, tenant: str, digest: str) -> Sequence:
        number = len(self.sequences)
        request = Request(
            f"r{number}",
            (1,),
            Sampling(),
            digest,
            digest,
            lambda delta: None,
            0.0,
            0.0,
            share=Share(tenant),
        )
        sequence = Sequence(request, 0, 0, [1], number=number, state=SequenceState.WAITING)
        self.fair.enter(request.share, 1, begins=True)
        self.sequences.append(sequence)
        self.gate.start_round()
        self.gate.enter(sequence, 0.0)
        return sequence

    def due(self, now: float = 1.0) -> list[tuple[str, list[str]]]:
        found = self.claims.due(self.sequences, now)
        return [(c.claimant.tenant, [s.request.adapter_digest for s in c.yielding]) for c in found]


@pytest.mark.parametrize(
    ("held", "blocked", "claims"),
    [
        ({"flood": "abcd"}, {"caller": "w"}, [("caller", ["a"])]),
        ({"flood": "aabbc"}, {"caller": "w"}, [("caller", ["c"])]),  # the fewest sequences
        ({"flood": "ab", "other": "cd"}, {"third": "w"}, [("third", ["c"])]),
        ({"flood": "abc", "caller": "d"}, {"caller": "w"}, [("caller", ["a"])]),
        ({"flood": "ab", "caller": "cd"}, {"caller": "w"}, []),  # has its share
        ({"flood": "abcd"}, {"flood": "w"}, []),  # nobody else
        ({"flood": "a"}, {"caller": "w"}, []),  # the only one stays
        ({"flood": "aE"}, {"caller": "w"}, []),  # E is of another pool
        ({"flood": "PQ"}, {"caller": "w"}, []),  # P is pinned, Q the only one besides
        ({"flood": "abc", "other": "ab"}, {"caller": "w"}, [("caller", ["c"])]),
        ({"flood": "ab", "other": "ab"}, {"caller": "w"}, []),  # used by both
        ({"flood": "abcd", "other": "a"}, {"caller": "w"}, [("caller", ["b"])]),
    ],
)
def test_claims(held, blocked, claims):
    assert Case(held, blocked).due() == claims


def test_a_claim_is_not_repeated_before_the_slot_can_be_free():
    case = Case({"flood": "abcd"}, {"caller": "w"})
    assert case.due(1.0)
    assert not case.due(1.1)
    assert case.due(1.3)


def test_who_loads_claims_nothing_and_who_can_enter_does():
    case = Case({"flood": "abcd"}, {"caller": "w"})
    case.residency.loading.add("w")
    assert not case.due()
    case.residency.resident.add("w")
    assert not case.due(3.0)
    assert case.sequences[-1].slot == 1
