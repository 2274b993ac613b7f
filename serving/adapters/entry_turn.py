"""The wait of a request for host memory for its adapter, beside an event loop. No jax."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.host_memory.room import HostShare
from lora_jax.adapters.host_memory.room_line import LOOK_S
from lora_jax.adapters.registry import AdapterRegistry
from lora_jax.adapters.registry_errors import HostFull
from serving.adapters.rollouts import Rollouts
from serving.api.config import EngineConfig


class EngineOfAdapters(Protocol):
    """Parts of an engine that a request for an adapter needs."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def registry(self) -> AdapterRegistry: ...
    @property
    def rollouts(self) -> Rollouts: ...


async def stay() -> None:
    """Go on waiting."""


async def entry_in_turn(
    engine: EngineOfAdapters,
    name: str,
    share: HostShare | None = None,
    *,
    lends: bool = True,
    look: Callable[[], Awaitable[None]] = stay,
) -> AdapterEntry:
    """Return the entry of an adapter; what is not in memory is read in a thread.

    Where adapters in use take all host memory it waits, up to `adapter_wait_s`, and holds no thread
    meanwhile; beyond `max_queue` such requests only callers below their part of it wait. With
    `lends` the entry counts as in use for as long as the caller holds it. Raises what
    `AdapterRegistry.resolve` raises, and what `look` raises, which is called during the wait.
    """
    registry, wait_s = engine.registry, engine.config.adapter_wait_s
    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(woken.set)

    owner = "" if share is None else share.owner
    with registry.line.ticket(wake, wait_s=wait_s, lends=lends, owner=owner) as ticket:
        until, waits = loop.time() + wait_s, False
        while True:
            woken.clear()
            ticket.seen = registry.line.num_changes
            if (entry := registry.find(name, ticket)) is not None:
                return entry
            try:
                resolve = engine.rollouts.resolve
                return await asyncio.to_thread(resolve, name, share, ticket=ticket)
            except HostFull as full:
                registry.line.check_open()
                # Once: those that wait are not refused for the sake of others that come.
                if not waits and registry.line.is_too_long(ticket, engine.config.max_queue):
                    raise
                waits = True
                left = until - loop.time()
                if left <= 0:
                    raise full.after(wait_s) from None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), min(left, LOOK_S))
            await look()
