"""Work of one request aside from the event loop."""

import asyncio
import threading

import pytest

from serving.http.lanes import Lane, run_in


def test_short_work_does_not_wait_for_long_work():
    release = threading.Event()

    async def run() -> str:
        long = [asyncio.create_task(run_in(Lane.LONG, release.wait)) for _ in range(4)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(run_in(Lane.SHORT, str, b"ab", "ascii"), 60)
        finally:
            release.set()
            await asyncio.gather(*long)

    assert asyncio.run(run()) == "ab"


def test_errors_come_back():
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in(Lane.SHORT, divmod, 1, 0))
