"""A request whose adapter finds no room in host memory waits, and no thread with it."""

import asyncio
import dataclasses

import pytest
from support.doubles.fake_engine import engine_without_room, wait_for_line

from lora_jax.adapters.registry import AdapterNotFound, HostFull
from serving.adapters import entry_turn
from serving.adapters.entry_turn import entry_in_turn


@pytest.fixture
def engine(tmp_path):
    return engine_without_room(tmp_path)


def test_requests_wait_for_room_and_those_for_adapters_in_memory_pass(engine):
    async def run():
        waiting = [asyncio.ensure_future(entry_in_turn(engine, "sql", None)) for _ in range(40)]
        await wait_for_line(engine, 40)  # of more requests than threads
        assert (await entry_in_turn(engine, "law", None)).name == "law"
        engine.registry.full = False
        engine.registry.line.changed()
        return await asyncio.wait_for(asyncio.gather(*waiting), 60)

    assert {entry.name for entry in asyncio.run(run())} == {"sql"}
    assert not len(engine.registry.line)


def test_the_wait_is_bounded_and_says_what_to_change(engine):
    engine.config = dataclasses.replace(engine.config, adapter_wait_s=0.01)
    with pytest.raises(HostFull, match=r"'sql': in use\. The request has waited for 0\.01 s"):
        asyncio.run(entry_in_turn(engine, "sql", None))
    engine.registry.full = False
    with pytest.raises(AdapterNotFound):
        asyncio.run(entry_in_turn(engine, "nobody", None))


def test_no_more_requests_wait_than_the_queue_holds(engine, monkeypatch):
    """Who came first goes on waiting, however often it looks while others come."""
    engine.config = dataclasses.replace(engine.config, max_queue=1)
    monkeypatch.setattr(entry_turn, "LOOK_S", 0.001)

    async def run():
        waiting = asyncio.ensure_future(entry_in_turn(engine, "sql", None))
        await wait_for_line(engine, 1)
        with pytest.raises(HostFull, match=r"^Adapter 'sql': in use\.$"):
            await asyncio.wait_for(entry_in_turn(engine, "sql", None), 60)
        with engine.registry.line.ticket(lambda: None) as other:
            engine.registry.line.enter(other, "sql")
            looks = asyncio.Queue()
            monkeypatch.setattr(engine.registry, "find", lambda *given: looks.put_nowait(given))
            for _ in range(3):
                await asyncio.wait_for(looks.get(), 60)
        monkeypatch.undo()
        assert not waiting.done()
        engine.registry.full = False
        engine.registry.line.changed()
        return await asyncio.wait_for(waiting, 60)

    assert asyncio.run(run()).name == "sql"
