"""A request whose adapter finds no room in host memory waits, and no thread with it."""

import asyncio
import dataclasses

import pytest
from starlette.requests import ClientDisconnect
from support.doubles.fake_engine import FakeEngine, write_fake_adapters

from lora_jax.adapters.registry import AdapterNotFound, HostFull
from serving.http.requests.adapter_turn import entry_in_turn
from serving.runtime import entry_turn


@pytest.fixture
def engine(tmp_path):
    made = FakeEngine(write_fake_adapters(tmp_path, "sql", "law"))
    made.registry.load("law", "law")
    made.registry.full = True
    return made


async def in_line(engine, count: int) -> None:
    while len(engine.registry.line) != count:
        await asyncio.sleep(0.001)


def test_requests_wait_for_room_and_those_for_adapters_in_memory_pass(engine):
    async def run():
        waiting = [asyncio.ensure_future(entry_in_turn(engine, "sql", None)) for _ in range(40)]
        await asyncio.wait_for(in_line(engine, 40), 60)  # of more requests than threads
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


def test_no_more_requests_wait_than_the_queue_holds(engine):
    engine.config = dataclasses.replace(engine.config, max_queue=1)

    async def run():
        waiting = asyncio.ensure_future(entry_in_turn(engine, "sql", None))
        await asyncio.wait_for(in_line(engine, 1), 60)
        with pytest.raises(HostFull, match=r"^Adapter 'sql': in use\.$"):
            await asyncio.wait_for(entry_in_turn(engine, "sql", None), 60)
        engine.registry.full = False
        engine.registry.line.changed()
        return await asyncio.wait_for(waiting, 60)

    assert asyncio.run(run()).name == "sql"


def test_a_client_that_leaves_does_not_stand_in_the_line(engine, monkeypatch):
    monkeypatch.setattr(entry_turn, "LOOK_S", 0.001)

    async def run():
        gone = asyncio.Event()

        async def is_gone():
            return gone.is_set()

        waiting = asyncio.ensure_future(entry_in_turn(engine, "sql", None, is_gone=is_gone))
        await asyncio.wait_for(in_line(engine, 1), 60)
        gone.set()
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(run())
    assert not len(engine.registry.line)
