"""Host memory of a registry's adapters: copies, those that stay, and the line for room. No jax."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter, RegistryLimits
from lora_jax.adapters.host_memory.copies import HostCopies
from lora_jax.adapters.host_memory.lent_entries import LentEntries
from lora_jax.adapters.host_memory.room import HostShare, no_room, no_room_beside_pins
from lora_jax.adapters.host_memory.room_line import RoomLine, Ticket
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import AdapterRejected, HostFull


class Staying(NamedTuple):
    """Digests that requests need, which are never evicted, and names that are evicted last."""

    in_use: frozenset[str]
    kept: Collection[str]


class HostTier:
    """The copies in memory; the registry's lock guards all but `line`, `staying` and `set_*`."""

    def __init__(self, ledger: UseLedger, limits: RegistryLimits, clock: Callable[[], float]):
        self.copies = HostCopies(ledger)
        self.line = RoomLine(clock)
        self._limits = limits
        self._lent = LentEntries()
        self._in_use: Callable[[], Collection[str]] = frozenset
        self._kept: Callable[[], Collection[str]] = frozenset

    def set_in_use(self, in_use: Callable[[], Collection[str]]) -> None:
        """Ask `in_use` for the digests that live requests need."""
        self._in_use = in_use

    def set_kept(self, kept: Callable[[], Collection[str]]) -> None:
        """Ask `kept` for the names that are evicted last."""
        self._kept = kept

    def staying(self) -> Staying:
        """Return what stays; to be asked before the registry's lock is taken."""
        lent = self._lent.digests()  # first: a caller's entry becomes a request's
        return Staying(lent | frozenset(self._in_use()), self._kept())

    def given(self, entry: AdapterEntry, ticket: Ticket | None) -> AdapterEntry:
        """Return the entry as a request gets it: in use for as long as the caller holds it."""
        return self._lent.lend(entry) if ticket is not None and ticket.lends else entry

    def handed_in(self, entry: AdapterEntry) -> None:
        """A request of the engine holds the entry from now on."""
        self._lent.give_back(entry)

    def check_open(self, entry: AdapterEntry, ticket: Ticket | None) -> None:
        """Raise HostFull while an adapter in memory gets no requests; this one then waits."""
        if ticket is not None and self.line.is_closed(entry.digest, ticket):
            self._wait(entry.name, ticket)

    def take_turn(self, name: str, ticket: Ticket | None) -> None:
        """Raise HostFull where earlier requests wait for room; this one then waits behind them."""
        if ticket is not None and self.line.must_wait(ticket):
            self._wait(name, ticket)

    def victims(
        self,
        new: AdapterEntry | EvictedAdapter,
        share: HostShare,
        stay: Staying,
        ticket: Ticket | None,
    ) -> list[str]:
        """Return the names to evict so that an adapter fits.

        Raises HostFull where it does not fit now, and then the ticket's request waits, and
        AdapterRejected where it never fits.
        """
        in_use = stay.in_use | self._lent.digests()
        try:
            gone = self.copies.make_room(new, share, self._limits, in_use, stay.kept)
        except HostFull as error:
            idle = self._gone_when_idle(new, share, stay.kept)
            if ticket is not None:
                self.line.enter(ticket, new.name)
                self.line.drain(ticket, idle)
            raise error.about(new.name) from None
        except AdapterRejected as error:
            raise error.about(new.name) from None
        return self.copies.names(gone - {new.digest})

    def _gone_when_idle(
        self, new: AdapterEntry | EvictedAdapter, share: HostShare, kept: Collection[str]
    ) -> frozenset[str]:
        """Return what would go for an adapter if requests used none; AdapterRejected: too little.

        Nothing is known of what is being read, so that room may be there when it is in memory.
        """
        try:
            return frozenset(self.copies.make_room(new, share, self._limits, (), kept))
        except HostFull:
            if self.copies.holds_room:
                return frozenset()
            raise no_room_beside_pins(new.report.weight_bytes).about(new.name) from None

    def _wait(self, name: str, ticket: Ticket) -> None:
        self.line.enter(ticket, name)
        raise no_room().about(name)
