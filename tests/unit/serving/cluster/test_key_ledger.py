"""A key's limit of running sequences holds over all instances; the rest waits at the front."""

import asyncio
import contextlib
import random

import pytest

from serving.api.request import Share
from serving.cluster.key_ledger import KeyLedger
from serving.http.errors import ApiError

TWO = Share("key", max_running=2, max_waiting=3)


class Case:
    """Requests that hold their room until `end` is called for them."""

    def __init__(self):
        self.ledger, self.inside, self.tasks, self.ends = KeyLedger(), [], {}, {}

    def ask(self, name: str, sequences: int = 1, share: Share = TWO) -> None:
        self.ends[name] = asyncio.Event()

        async def request():
            async with self.ledger.room(share, sequences):
                self.inside.append(name)
                await self.ends[name].wait()
            self.inside.remove(name)

        self.tasks[name] = asyncio.create_task(request())

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_enter_in_order_as_others_end():
    async def run():
        case = Case()
        for name in "abcd":
            case.ask(name)
        case.ask("other", share=Share("other", max_running=1))
        await settle()
        assert sorted(case.inside) == ["a", "b", "other"]
        await case.end("b")
        assert sorted(case.inside) == ["a", "c", "other"]
        for name in ("a", "c", "d", "other"):
            await case.end(name)
        assert not case.ledger.num_keys

    asyncio.run(run())


def test_a_large_request_is_not_passed_by_and_counts_as_the_limit():
    async def run():
        case = Case()
        case.ask("a")
        case.ask("large", 128)
        case.ask("b")
        await settle()
        assert case.inside == ["a"]
        await case.end("a")
        assert case.inside == ["large"]
        await case.end("large")
        assert case.inside == ["b"]
        await case.end("b")

    asyncio.run(run())


def test_more_waiting_than_the_limit_is_429_and_leaves_no_trace():
    async def run():
        case = Case()
        for name in "abcde":
            case.ask(name)
        await settle()
        with pytest.raises(ApiError, match="max_waiting=3") as refused:
            async with case.ledger.room(TWO, 1):
                raise AssertionError("it got in")
        assert refused.value.status == 429
        assert refused.value.headers["Retry-After"] == "1"
        for name in "abcde":
            await case.end(name)
        assert not case.ledger.num_keys

    asyncio.run(run())


def test_a_key_without_a_limit_and_a_body_without_sequences_pass():
    async def run():
        ledger = KeyLedger()
        async with ledger.room(Share("key"), 500), ledger.room(TWO, 0):
            assert not ledger.num_keys

    asyncio.run(run())


def test_a_limit_that_becomes_smaller_lets_those_in_that_wait():
    """Before: a request that asked for more waited for ever, and all others behind it."""

    async def run():
        case = Case()
        case.ask("a", share=Share("key", max_running=1))
        case.ask("large", 8, Share("key", max_running=8))
        case.ask("b", share=Share("key", max_running=1))
        await settle()
        assert case.inside == ["a"]
        for name in ("a", "large", "b"):
            await case.end(name)
        assert not case.ledger.num_keys

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("seed", range(4))
def test_clients_that_leave_at_any_time_leave_their_room(seed):
    async def run():
        rng, case, most = random.Random(seed), Case(), 0
        share = Share("key", max_running=4)
        for number in range(200):
            case.ask(str(number), rng.randrange(1, 7), share)
            if rng.random() < 0.7:
                await asyncio.sleep(0)
            most = max(most, len(case.inside))
            name = str(rng.randrange(number + 1))
            if rng.random() < 0.5:
                case.tasks[name].cancel()
            else:
                case.ends[name].set()
        assert 1 < most <= 4
        for name, task in case.tasks.items():
            case.ends[name].set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)
        assert not case.ledger.num_keys

    asyncio.run(run())
