"""The page exchange: things of least worth leave first, whichever side they are of."""

from types import SimpleNamespace

from serving.scheduling.pages.exchange import Offer, PageExchange


class Side:
    """Things of a value and a number of pages; what was given leaves."""

    def __init__(self, *things: tuple[float, int]):
        self.things, self.pages_leaving, self.gone = sorted(things), 0, []
        self.seconds = 0.0

    def offer(self):
        if not self.things:
            return None
        value, pages = self.things[0]
        return Offer(value, pages, self.give, self.seconds)

    def give(self):
        self.gone.append(self.things.pop(0))
        self.pages_leaving += self.gone[-1][1]


def exchange(available: int, *sides: Side, pages: int = 80) -> PageExchange:
    made = PageExchange(SimpleNamespace(page_bytes=4096, num_pages=pages, num_available=available))
    for side in sides:
        made.join(side)
    return made


def test_pages_that_are_free_are_claimed_at_once():
    side = Side((1.0, 4))
    assert exchange(4, side).claim(4, side, own=True)
    assert not side.gone


def test_the_least_valuable_of_both_sides_leaves_and_the_claim_waits():
    kv, adapters = Side((1.0, 2), (5.0, 2)), Side((2.0, 3), (4.0, 3))
    made = exchange(1, kv, adapters)
    assert not made.claim(5, adapters, own=True)
    assert (kv.gone, adapters.gone) == ([(1.0, 2)], [(2.0, 3)])
    assert made.level == 2.0, "what stays is worth more than what went"
    assert made.num_given == 2
    made.start_step()
    assert not made.claim(5, adapters, own=True), "what is leaving already is enough"
    assert made.num_given == 2
    assert not made.claim(2, adapters, own=True), "claims of one step add up"
    assert made.num_given == 3


def test_not_all_of_the_pool_leaves_at_a_time():
    side = Side(*((1.0, 1) for _ in range(20)))
    assert not exchange(0, side, pages=20).claim(20, side, own=True)
    assert len(side.gone) == 2  # an eighth of 20 pages


def test_after_a_claim_that_waits_some_pages_are_freed_ahead():
    side = Side(*((1.0, 1) for _ in range(20)))
    made = exchange(0, side, pages=96)
    made.start_step()
    assert not side.gone, "nobody has claimed any"
    assert not made.claim(1, side, own=True)
    made.start_step()
    assert len(side.gone) == 3  # a 32nd of the pool
    side.pages_leaving = 0
    for _ in range(64):
        made.start_step()
    gone = len(side.gone)
    side.pages_leaving = 0
    made.start_step()
    assert len(side.gone) == gone, "claims have not come for long"


def test_a_claim_may_name_what_it_is_worth():
    side = Side((3.0, 1), (1.0, 1))
    made = exchange(0, side)
    assert not made.claim(2, side, own=True, below=2.0)
    assert side.gone == [(1.0, 1)]


def test_a_side_need_not_give_up_its_own():
    kv, adapters = Side((1.0, 2)), Side((9.0, 3))
    made = exchange(0, kv, adapters)
    assert not made.claim(2, kv, own=False)
    assert (kv.gone, adapters.gone) == ([], [(9.0, 3)])


def test_nothing_to_give_up_is_no_error():
    side = Side()
    assert not exchange(0, side).claim(3, side, own=True)


def test_seconds_follow_what_was_measured():
    made = exchange(0)
    before = made.compute_s(1000), made.load_s(1 << 20)
    for number in range(80):
        made.planned(number * 1.0)
        made.completed(100, 1, number + 0.5)  # 200 tokens a second
        made.spent(0.010)
        made.came("a", 1 << 20)
    assert before[0] < 1.0 < 4.9 < made.compute_s(1000) < 5.2
    assert before[1] < 0.002 < 0.009 < made.load_s(1 << 20) < 0.011
    for _ in range(80):
        made.came("a", 1 << 20)  # copied by nobody's time but the bus's
    assert 0 < made.load_s(1 << 20) < 0.0005
    made.planned(100.0)
    made.planned(100.1)
    made.completed(4, 4, 101.0)  # no prompt
    made.completed(500, 2, 103.5)  # began when the one before had ended
    assert 4.9 < made.compute_s(1000) < 5.2


def test_a_claim_has_others_lose_no_more_than_its_wait_has_cost():
    """A step of half a second; of four sequences one waits, so each step costs an eighth."""
    side = Side((1.0, 2))
    made = exchange(0, side)
    side.seconds = 0.3
    for number in range(80):
        made.planned(number * 1.0)
        made.completed(1, 1, number + 0.5)
    for waited in (0.0, 0.125, 0.25):
        made.start_step(4)
        assert not made.claim(2, side, own=True)
        assert not side.gone, f"{waited} s of waiting are worth less than 0.3 s"
    made.start_step(4)
    assert not made.claim(2, side, own=True)
    assert side.gone == [(1.0, 2)]


def test_no_claim_is_looked_at_after_one_that_found_nothing_to_take():
    made = exchange(1, Side())
    made.start_step(4)
    assert made.claim(1, Side(), own=True)
    assert not made.is_spent
    assert not made.claim(2, Side(), own=True)
    assert made.is_spent
    made.start_step(4)
    assert not made.is_spent


def test_what_is_urgent_does_not_count_seconds():
    side, idle = Side((1.0, 2)), Side((1.0, 2))
    side.seconds = idle.seconds = 9.0
    made = exchange(0, side)
    made.start_step(4)
    assert not made.claim(2, side, own=True, urgent=True)
    assert side.gone == [(1.0, 2)]
    made = exchange(0, idle)
    made.start_step(0)  # nothing runs
    assert not made.claim(2, idle, own=True)
    assert idle.gone == [(1.0, 2)]


def test_shares_add_up():
    found = exchange(5, pages=20).shares(kv_pages=8)
    assert (found.total_bytes, found.kv_bytes, found.adapter_bytes) == (20 << 12, 8 << 12, 7 << 12)


def steps_until_room(step, *, claims_every: int = 1) -> tuple[int, PageExchange]:
    """Run steps with a claim in some of them; return the step whose claim was given room.

    `step` returns a number's tokens, rows and seconds.
    """
    side = Side((1.0, 2))
    made = exchange(0, side)
    side.seconds = 0.5
    for number in range(1000):
        tokens, rows, seconds = step(number)
        made.planned(number * 1.0)
        made.completed(tokens, rows, number + seconds)
        made.start_step(rows, 1)
        if number % claims_every == 0:
            assert not made.claim(2, side, own=True)
        if side.gone:
            return number, made
    raise AssertionError("no step has made room")


def test_a_claim_beside_steps_that_never_end_is_met_in_the_end():
    """Rows cause all of a step's time, as on a CPU: waiting still comes to cost something."""
    number, _ = steps_until_room(lambda n: (2 + n % 8, 2 + n % 8, (2 + n % 8) * 0.01))
    assert number < 400


def test_a_claim_that_is_made_once_in_many_steps_is_met_in_the_end():
    """All rows are taken but for a step now and then; base requests pass the waiting one."""
    number, made = steps_until_room(lambda n: (4, 4, 0.1), claims_every=20)
    assert number > 200, "at 25 ms a claim"
    for _ in range(65):
        made.start_step(4, 1)
    assert made._credit_s == 0.0, "no claim was made for long"


def test_steps_that_all_hold_prompts_have_claims_gain_too():
    number, _ = steps_until_room(lambda n: (100, 4, 0.8))
    assert 10 < number < 100


def test_while_a_sequence_starves_the_first_claim_of_an_adapter_is_urgent():
    kv, adapters = Side((9.0, 1)), Side((1.0, 2), (2.0, 2))
    kv.seconds = adapters.seconds = 9.0
    made = exchange(0, kv, adapters)
    made.start_step(4)
    assert not made.claim(2, adapters, own=True)
    assert made.is_spent
    made.start_step(4, is_starving=True)
    assert not made.claim(1, kv, own=False)
    assert not adapters.gone, "KV's is none of an adapter"
    assert not made.is_spent
    assert not made.claim(1, adapters, own=True)
    assert adapters.gone == [(1.0, 2)]
    assert not made.claim(1, adapters, own=True)
    assert made.is_spent
    assert len(adapters.gone) == 1
