"""The wait of a request for host memory for its adapter, beside the event loop."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect

from lora_jax.adapters.host_room import HostShare
from lora_jax.adapters.registry import AdapterEntry, HostFull
from lora_jax.adapters.room_line import LOOK_S
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
    """Return the entry of an adapter; what is not in memory is read in a thread.

    Where adapters in use take all host memory it waits, up to `adapter_wait_s`, and holds no thread
    meanwhile; beyond `max_queue` such requests only callers below their part of it wait. With
    `lends` the entry counts as in use for as long as the caller holds it. Raises what
    `AdapterRegistry.resolve` raises, and ClientDisconnect when the client `is_gone`.
    """
    registry, wait_s = engine.registry, engine.config.adapter_wait_s
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(woken.set)

    owner = "" if share is None else share.owner
    with registry.line.ticket(wake, wait_s=wait_s, lends=lends, owner=owner) as ticket:
        until = loop.time() + wait_s
        while True:
            woken.clear()
            ticket.seen = registry.line.num_changes
            if (entry := registry.find(name, ticket)) is not None:
                return entry
            try:
                resolve = engine.rollouts.resolve
                return await asyncio.to_thread(resolve, name, share, ticket=ticket)
            except HostFull as full:
                if registry.line.is_too_long(ticket, engine.config.max_queue):
                    raise
                left = until - loop.time()
                if left <= 0:
                    raise full.after(wait_s) from None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), min(left, LOOK_S))
            if await is_gone():
                raise ClientDisconnect
