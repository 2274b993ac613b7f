"""Ledger of reserved, created and mapped pages; every backend rejects the same errors. No jax."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from lora_jax.memory.virtual import Access, MappingError


@dataclasses.dataclass
class LedgerPage:
    """A physical page: its bytes, whether it is another process's, how often it is mapped."""

    num_bytes: int
    imported: bool
    mappings: int = 0


@dataclasses.dataclass(frozen=True)
class Mapping:
    """One page at one address."""

    address: int
    num_bytes: int
    handle: int
    access: Access

    @property
    def end(self) -> int:
        return self.address + self.num_bytes


class AddressLedger:
    """Books of one memory. `check_*` and `find_*` raise MappingError, the others only record.

    Not thread-safe: its owner holds a lock over check, system call and record.
    """

    def __init__(self, granularity: int):
        self.granularity = granularity
        self.pages: dict[int, LedgerPage] = {}
        self._reserved: dict[int, int] = {}  # address -> bytes
        self._reserved_starts: list[int] = []
        self._mappings: dict[int, Mapping] = {}
        self._mapping_starts: list[int] = []

    @property
    def created_bytes(self) -> int:
        """Bytes of the pages that are not imported."""
        return sum(p.num_bytes for p in self.pages.values() if not p.imported)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space with a page behind them."""
        return sum(m.num_bytes for m in self._mappings.values())

    def check_size(self, what: str, num_bytes: int) -> None:
        """Refuse sizes that are not a positive multiple of the granularity."""
        if num_bytes <= 0 or num_bytes % self.granularity:
            raise MappingError(
                f"{what}: {num_bytes} bytes is not a positive multiple of {self.granularity}"
            )

    def find_page(self, handle: int) -> LedgerPage:
        """Return the page of a handle."""
        if handle not in self.pages:
            raise MappingError(f"there is no page with handle {handle}")
        return self.pages[handle]

    def check_unused(self, handle: int) -> None:
        """Refuse a page that is mapped."""
        if count := self.find_page(handle).mappings:
            raise MappingError(f"page {handle} is still mapped at {count} address(es)")

    def check_release(self, address: int, num_bytes: int) -> None:
        """Refuse to release what is not exactly one reservation, or has pages in it."""
        if self._reserved.get(address) != num_bytes:
            raise MappingError(f"no reservation of {num_bytes} bytes starts at {address:#x}")
        at = bisect.bisect_left(self._mapping_starts, address)
        if at < len(self._mapping_starts) and self._mapping_starts[at] < address + num_bytes:
            first = self._mapping_starts[at]
            raise MappingError(f"range {address:#x} + {num_bytes} has a page mapped at {first:#x}")

    def is_reserved(self, address: int, num_bytes: int = 1) -> bool:
        """Return whether the range, of at least one byte, is inside one reservation."""
        at = bisect.bisect_right(self._reserved_starts, address) - 1
        if at < 0 or num_bytes <= 0:
            return False
        start = self._reserved_starts[at]
        return address + num_bytes <= start + self._reserved[start]

    def check_reserved(self, what: str, address: int, num_bytes: int) -> None:
        """Refuse addresses that are not inside one reservation."""
        if not self.is_reserved(address, num_bytes):
            raise MappingError(f"{what}: {address:#x} + {num_bytes} is outside every reservation")

    def check_map(self, address: int, handles: Sequence[int], num_bytes: int) -> Access:
        """Refuse a run of pages that is misaligned, outside, over a mapping or of another size.

        Returns the access that the mapping gives: READ_WRITE to own pages, READ to imported ones.
        """
        self.check_size("map", num_bytes)
        if address % self.granularity:
            raise MappingError(f"map: {address:#x} is not a multiple of {self.granularity}")
        self.check_reserved("map", address, num_bytes)
        if (size := sum(self.find_page(handle).num_bytes for handle in handles)) != num_bytes:
            raise MappingError(f"map: pages {list(handles)} have {size} bytes, not {num_bytes}")
        if taken := self._touching(address, num_bytes):
            raise MappingError(
                f"map: {address:#x} + {num_bytes} is mapped already "
                f"at {taken[0].address:#x} + {taken[0].num_bytes}"
            )
        imported = {self.pages[handle].imported for handle in handles}
        if len(imported) > 1:
            raise MappingError("map: own and imported pages cannot be mapped in one run")
        return Access.READ if imported.pop() else Access.READ_WRITE

    def places(self, address: int, handles: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (address, bytes, handle) of pages that lie behind one another."""
        sizes = [self.pages[handle].num_bytes for handle in handles]
        starts = itertools.accumulate(sizes, initial=address)
        return list(zip(starts, sizes, handles, strict=False))

    def find_mappings(self, what: str, address: int, num_bytes: int) -> list[Mapping]:
        """Return the mappings that fill the range exactly, in order."""
        mappings = self._covering(what, address, num_bytes)
        if mappings[0].address != address or mappings[-1].end != address + num_bytes:
            raise MappingError(
                f"{what}: {address:#x} + {num_bytes} cuts the mappings "
                f"{mappings[0].address:#x} .. {mappings[-1].end:#x}"
            )
        return mappings

    def check_protect(self, address: int, num_bytes: int, access: Access) -> list[Mapping]:
        """Return the mappings that fill the range; refuse to make imported pages writable."""
        mappings = self.find_mappings("protect", address, num_bytes)
        for mapping in mappings if access is Access.READ_WRITE else ():
            if self.pages[mapping.handle].imported:
                raise MappingError(f"protect: page {mapping.handle} is imported, so read-only")
        return mappings

    def check_access(self, what: str, address: int, num_bytes: int, *needed: Access) -> None:
        """Refuse a copy from or to bytes that are not mapped with one of the accesses needed."""
        for mapping in self._covering(what, address, num_bytes):
            if mapping.access not in needed:
                raise MappingError(
                    f"{what}: {mapping.address:#x} + {mapping.num_bytes} has access "
                    f"{mapping.access.name}"
                )

    def record_reservation(self, address: int, num_bytes: int) -> None:
        """Note a range of addresses that is reserved."""
        self._reserved[address] = num_bytes
        bisect.insort(self._reserved_starts, address)

    def forget_reservation(self, address: int) -> None:
        """Note that the range which begins here is released."""
        del self._reserved[address]
        self._reserved_starts.remove(address)

    def record_page(self, handle: int, num_bytes: int, imported: bool = False) -> None:
        """Note a physical page; an `imported` one is another process's."""
        self.pages[handle] = LedgerPage(num_bytes, imported)

    def forget_page(self, handle: int) -> None:
        """Note that a page is released."""
        del self.pages[handle]

    def record_mapping(self, address: int, handle: int, access: Access) -> None:
        """Note that a page lies at an address."""
        page = self.pages[handle]
        page.mappings += 1
        self._mappings[address] = Mapping(address, page.num_bytes, handle, access)
        bisect.insort(self._mapping_starts, address)

    def record_access(self, address: int, access: Access) -> None:
        """Note the access to the mapping at an address."""
        self._mappings[address] = dataclasses.replace(self._mappings[address], access=access)

    def forget_mapping(self, address: int) -> None:
        """Note that nothing lies at the address."""
        self.pages[self._mappings.pop(address).handle].mappings -= 1
        del self._mapping_starts[bisect.bisect_left(self._mapping_starts, address)]

    def _touching(self, address: int, num_bytes: int) -> list[Mapping]:
        """Return the mappings that share a byte with the range, in order."""
        first = bisect.bisect_right(self._mapping_starts, address) - 1
        if first < 0 or self._mappings[self._mapping_starts[first]].end <= address:
            first += 1
        last = bisect.bisect_left(self._mapping_starts, address + num_bytes)
        return [self._mappings[start] for start in self._mapping_starts[first:last]]

    def _covering(self, what: str, address: int, num_bytes: int) -> list[Mapping]:
        """Return the mappings that hold every byte of the range, in order."""
        reached, mappings = address, self._touching(address, num_bytes)
        for mapping in mappings:
            if mapping.address > reached:
                break
            reached = mapping.end
        if num_bytes <= 0 or reached < address + num_bytes:
            raise MappingError(f"{what}: {address:#x} + {num_bytes} is not mapped at {reached:#x}")
        return mappings
