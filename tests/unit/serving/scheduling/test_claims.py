"""Yielding order: last sequence of the tenant farthest above its share, never the only one."""

from serving.api.request import Request, Sequence, Share
from serving.api.sampling import Sampling
from serving.scheduling.claims import Claims, decode_order
from serving.scheduling.fair_share import FairShares


def sequences(tenant: str, count: int, pages: int) -> list[Sequence]:
    request = Request(
        tenant, (1,), Sampling(), None, "", lambda delta: None, 0.0, 0.0, share=Share(tenant)
    )
    return [Sequence(request, i, 0, [1], pages=[0] * pages, number=i) for i in range(count)]


def case(running: list[Sequence], *more: str, rows: int = 8, free_pages: int = 50) -> Claims:
    fair = FairShares()
    for sequence in running:
        fair.enter(sequence.request.share, 1, begins=False)
        fair.start(sequence.tenant)
        fair.charge(sequence.tenant, 1)
    for tenant in more:
        fair.enter(Share(tenant), 1, begins=True)
    return Claims(
        fair,
        running,
        rows=rows,
        free_rows=rows - len(running),
        pages=100,
        free_pages=free_pages,
    )


def test_rows_come_from_the_last_of_the_largest():
    flood, small = sequences("flood", 6, 2), sequences("small", 2, 2)
    claims = case([*flood, *small], "new")
    assert claims.are_possible
    assert claims.may_run("new")
    assert claims.make_room("new", 1) == [flood[5]]
    assert claims.make_room("new", 1) == [flood[4]]
    assert not claims.may_run("new"), "a third is beyond 8 / 3"


def test_free_rows_and_pages_are_taken_first():
    flood = sequences("flood", 6, 2)
    assert case(flood, "new").make_room("new", 1) == []


def test_pages_come_from_whoever_holds_too_many():
    flood = sequences("flood", 4, 20)
    claims = case(flood, "new", free_pages=20)
    assert claims.make_room("new", 30) == [flood[3]]


def test_an_only_sequence_stays_and_so_does_who_has_had_less():
    claims = case([*sequences("a", 1, 90), *sequences("b", 1, 10)], "new", rows=2, free_pages=0)
    assert not claims.are_possible
    assert claims.make_room("new", 1) == []
    fair = FairShares()
    running = sequences("a", 4, 1)
    fair.enter(Share("a"), 4, begins=True)
    fair.enter(Share("b"), 1, begins=True)
    fair.charge("b", 1000)
    claims = Claims(fair, running, rows=4, free_rows=0, pages=9, free_pages=5)
    assert claims.make_room("b", 1) == []


def test_where_pages_are_short_the_largest_gives_first():
    flood, small = sequences("flood", 3, 5), sequences("small", 2, 1)
    fair = FairShares()
    for tenant in ("flood", "small"):
        fair.enter(Share(tenant), 1, begins=True)
    assert decode_order([*flood, *small], fair, 20) == [*small, *flood]
