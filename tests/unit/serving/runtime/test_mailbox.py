"""Items arrive complete, in order, with few wake-ups, and never raise in the sender's thread."""

import asyncio
import threading

import pytest

from serving.runtime.mailbox import LONGEST_PAUSE_S, MOST_KEPT, Inbox, Mailbox


def test_everything_arrives_in_order_from_several_threads():
    async def run() -> list[list[tuple[int, int]]]:
        loop, mailbox = asyncio.get_running_loop(), Mailbox()
        queues = [Inbox() for _ in range(3)]

        def send(sender: int) -> None:
            for i in range(500):
                mailbox.put(loop, queues[i % 3], (sender, i))

        threads = [threading.Thread(target=send, args=(s,)) for s in range(4)]
        for thread in threads:
            thread.start()
        got = [[await queue.get() for _ in range(4 * n)] for queue, n in counts(queues)]
        for thread in threads:
            thread.join()
        assert all(queue.empty() for queue in queues)
        return got

    def counts(queues):
        return zip(queues, (167, 167, 166), strict=True)

    for items in asyncio.run(run()):
        for sender in range(4):
            mine = [i for s, i in items if s == sender]
            assert mine == sorted(mine)


def test_a_burst_is_one_wake_up():
    async def run() -> int:
        loop, mailbox, wakes = asyncio.get_running_loop(), Mailbox(), 0
        plain = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal wakes
            wakes += 1
            return plain(*args)

        loop.call_soon_threadsafe = counted
        queue = Inbox()
        for i in range(100):
            mailbox.put(loop, queue, i)
        assert [await queue.get() for _ in range(100)] == list(range(100))
        return wakes

    assert asyncio.run(run()) == 1


def test_an_inbox_takes_all_that_a_burst_has_for_it_at_once():
    taken = []

    class Told(Inbox):
        def take(self, items):
            taken.append(items)

    async def run() -> None:
        loop, mailbox, inboxes = asyncio.get_running_loop(), Mailbox(), [Told(), Told()]
        for i in range(6):
            mailbox.put(loop, inboxes[i % 2], i)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert taken == [[0, 2, 4], [1, 3, 5]]


def test_what_wakes_nobody_comes_with_what_does():
    async def run() -> list[object]:
        loop, mailbox, queue = asyncio.get_running_loop(), Mailbox(), Inbox()
        mailbox.put(loop, queue, "quiet", wakes=False)
        await asyncio.sleep(0.01)
        before = queue.qsize()
        mailbox.put(loop, queue, "loud")
        return [before, await queue.get(), await queue.get()]

    assert asyncio.run(run()) == [0, "quiet", "loud"]


def test_many_that_wake_nobody_come_together():
    async def run() -> list[int]:
        loop, mailbox, queue, sizes = asyncio.get_running_loop(), Mailbox(), Inbox(), []
        for count in (MOST_KEPT - 1, 1, 1):
            for _ in range(count):
                mailbox.put(loop, queue, "quiet", wakes=False)
            await asyncio.sleep(0.01)
            sizes.append(queue.qsize())
        return sizes

    assert asyncio.run(run()) == [0, MOST_KEPT, MOST_KEPT]


def test_a_loop_that_is_long_busy_with_a_burst_gets_the_next_one_later(monkeypatch):
    """Twice as long as it took passes in between, up to 25 ms."""

    async def run(burst_s: float) -> float:
        loop, mailbox = asyncio.get_running_loop(), Mailbox()
        now, waits, got = loop.time(), [], []
        monkeypatch.setattr(loop, "time", lambda: now)
        monkeypatch.setattr(loop, "call_later", lambda wait, *call: waits.append((wait, call)))
        queue = Inbox()

        async def reads() -> None:
            nonlocal now
            while True:
                got.append(await queue.get())
                now += burst_s

        reader = asyncio.ensure_future(reads())
        await asyncio.sleep(0)
        mailbox.put(loop, queue, 1)
        for _ in range(5):
            await asyncio.sleep(0)
        mailbox.put(loop, queue, 2)
        for _ in range(5):
            await asyncio.sleep(0)
        reader.cancel()
        assert got == [1]
        ((wait, _),) = waits
        return wait

    waits = [asyncio.run(run(burst_s)) for burst_s in (0.0, 0.0004, 0.003, 1.0)]
    pauses = [0.002, 0.0016, 0.006, LONGEST_PAUSE_S]  # the first bursts take less than 2 ms
    assert waits == pytest.approx(pauses, abs=1e-6)


def test_after_a_pause_an_item_arrives_at_once(monkeypatch):
    async def run() -> None:
        loop, mailbox, queue = asyncio.get_running_loop(), Mailbox(), Inbox()
        mailbox.put(loop, queue, 1)
        await queue.get()
        await asyncio.sleep(0)  # then the mailbox knows how long the burst took
        now = loop.time() + 60
        monkeypatch.setattr(loop, "time", lambda: now)
        mailbox.put(loop, queue, 2)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert queue.get_nowait() == 2

    asyncio.run(run())


def test_a_closed_loop_drops_what_comes():
    loop = asyncio.new_event_loop()
    loop.close()
    mailbox = Mailbox()
    for i in range(3):
        mailbox.put(loop, Inbox(), i)
