"""Items arrive complete, in order, with few wake-ups, and never raise in the sender's thread."""

import asyncio
import threading

from serving.runtime.mailbox import Mailbox


def test_everything_arrives_in_order_from_several_threads():
    async def run() -> list[list[tuple[int, int]]]:
        loop, mailbox = asyncio.get_running_loop(), Mailbox()
        queues = [asyncio.Queue() for _ in range(3)]

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
        queue = asyncio.Queue()
        for i in range(100):
            mailbox.put(loop, queue, i)
        assert [await queue.get() for _ in range(100)] == list(range(100))
        return wakes

    assert asyncio.run(run()) == 1


def test_after_a_pause_an_item_arrives_at_once():
    async def run() -> None:
        loop, mailbox, queue = asyncio.get_running_loop(), Mailbox(), asyncio.Queue()
        mailbox.put(loop, queue, 1)
        await queue.get()
        await asyncio.sleep(0.01)
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
        mailbox.put(loop, asyncio.Queue(), i)
