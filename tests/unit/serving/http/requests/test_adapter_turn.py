"""A request that waits for host memory for its adapter leaves the line with its client."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from support.doubles.fake_engine import engine_without_room, wait_for_line

from serving.adapters import entry_turn
from serving.http.requests.adapter_turn import entry_in_turn


def test_a_client_that_leaves_does_not_stand_in_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(entry_turn, "LOOK_S", 0.001)

    engine = engine_without_room(tmp_path)

    async def run():
        gone = asyncio.Event()

        async def is_gone():
            return gone.is_set()

        waiting = asyncio.ensure_future(entry_in_turn(engine, "sql", None, is_gone=is_gone))
        await wait_for_line(engine, 1)
        gone.set()
        with pytest.raises(ClientDisconnect):
            await asyncio.wait_for(waiting, 60)

    asyncio.run(run())
    assert not len(engine.registry.line)
