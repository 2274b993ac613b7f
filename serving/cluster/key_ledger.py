"""Sequences of each API key in all instances together, so that a limit holds once. No jax.

An instance counts only what it has itself. The front therefore passes on no more sequences of a
key than may run, and lets further requests wait here, first come first served. A request of more
sequences than may run at all is passed on when none of the key's is under way; its instance then
holds the limit. A key without a limit of running sequences is not counted.
"""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncGenerator

from serving.api.request import Share
from serving.http.access.auth import limited

_RETRY_S = 1.0


@dataclasses.dataclass(eq=False)
class _Waiter:
    sequences: int
    room: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


@dataclasses.dataclass(eq=False)
class _Account:
    """One key. `line` holds its requests that wait, the first come first."""

    running: int = 0
    line: collections.deque[_Waiter] = dataclasses.field(default_factory=collections.deque)

    @property
    def waiting(self) -> int:
        return sum(waiter.sequences for waiter in self.line)


class KeyLedger:
    """Accounts of the keys with requests under way; the event loop's thread uses it."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    @property
    def num_keys(self) -> int:
        """Keys with requests here."""
        return len(self._accounts)

    @contextlib.asynccontextmanager
    async def room(self, share: Share, sequences: int) -> AsyncGenerator[None]:
        """Hold the key's room for a request of so many sequences, which waits until there is some.

        Raises ApiError 429 where more would wait than the key may have waiting.
        """
        most = share.max_running
        if most is None or not sequences:
            yield
            return
        account = self._accounts.setdefault(share.tenant, _Account())
        held = min(sequences, most)
        try:
            await self._enter(account, share, held, most)
        except BaseException:
            self._tidy(share.tenant, account)
            raise
        try:
            yield
        finally:
            account.running -= held
            self._let_in(account, most)
            self._tidy(share.tenant, account)

    async def _enter(self, account: _Account, share: Share, held: int, most: int) -> None:
        if not account.line and account.running + held <= most:
            account.running += held
            return
        if share.max_waiting is not None and account.waiting + held > share.max_waiting:
            raise limited(f"max_waiting={share.max_waiting} sequences", _RETRY_S)
        waiter = _Waiter(held)
        account.line.append(waiter)
        try:
            await waiter.room.wait()
        except BaseException:
            if waiter.room.is_set():  # it was let in while it left
                account.running -= held
            else:
                account.line.remove(waiter)
            self._let_in(account, most)
            raise

    def _let_in(self, account: _Account, most: int) -> None:
        """Let the first ones in; alone one always may: the limit may have been larger once."""
        while account.line and (
            not account.running or account.running + account.line[0].sequences <= most
        ):
            waiter = account.line.popleft()
            account.running += waiter.sequences
            waiter.room.set()

    def _tidy(self, tenant: str, account: _Account) -> None:
        if not account.running and not account.line and self._accounts.get(tenant) is account:
            del self._accounts[tenant]
