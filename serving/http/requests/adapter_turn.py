"""The wait of a request for host memory for its adapter, for as long as its client stays."""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect

from lora_jax.adapters.host_memory.room import HostShare
from lora_jax.adapters.registry import AdapterEntry
from serving.adapters import entry_turn
from serving.http.interface import AbstractEngine

IsGone = Callable[[], Awaitable[bool]]


async def never() -> bool:
    """Say that the client is there."""
    return False


async def entry_in_turn(
    engine: AbstractEngine,
    name: str,
    share: HostShare | None,
    *,
    lends: bool = True,
    is_gone: IsGone = never,
) -> AdapterEntry:
    """Do what `adapters.entry_turn` does; raises ClientDisconnect when the client `is_gone`."""

    async def look() -> None:
        if await is_gone():
            raise ClientDisconnect

    return await entry_turn.entry_in_turn(engine, name, share, lends=lends, look=look)
