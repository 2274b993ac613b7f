"""Eviction of adapter copies from host memory, to make room for another one. No jax.

The policy is a pure function (`least_valuable`) over plain data; see `use_ledger` for the value.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import AdapterRejected, HostFull, RegistryBusy


@dataclasses.dataclass(frozen=True)
class HostShare:
    """Host memory for the adapters that one caller named; None: no limit."""

    owner: str = ""  # "" is the operator and everybody without a key
    max_adapters: int | None = None
    max_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """The weights of one digest; `fixed` says that they are pinned or in use."""

    digest: str
    num_bytes: int
    last_use: int  # grows with every use
    value: float = 0.0  # see use_ledger.UseLedger.value
    owner: str = ""
    fixed: bool = False
    kept: bool = False  # evicted only after all that are not


Policy = Callable[[Sequence[HostCopy], int, int], list[HostCopy] | None]


def least_valuable(copies: Sequence[HostCopy], num_bytes: int, count: int) -> list[HostCopy] | None:
    """Return what to evict to free both; None when that is not enough.

    The least valuable go first, of equal ones the longest unused.
    """
    victims: list[HostCopy] = []
    for copy in sorted(copies, key=lambda copy: (copy.kept, copy.value, copy.last_use)):
        if num_bytes <= 0 and count <= 0:
            break
        if not copy.fixed:
            victims.append(copy)
            num_bytes, count = num_bytes - copy.num_bytes, count - 1
    return victims if num_bytes <= 0 and count <= 0 else None


def make_room(
    copies: Iterable[HostCopy],
    num_bytes: int,
    share: HostShare,
    max_total_bytes: int,
    policy: Policy = least_valuable,
    *,
    max_count: int | None = None,
    held: tuple[int, int] = (0, 0),
) -> set[str]:
    """Return the digests to evict so that a new copy fits its caller's limits and the server's.

    `num_bytes` 0 is a copy that is there already. `max_count` bounds the copies of the server;
    copies that are being read `held` so many bytes and are so many. Raises AdapterRejected when it
    can never fit, RegistryBusy when the caller's limit does not allow it now, and HostFull when the
    server's does not.
    """
    copies = list(copies)
    for name, limit in (("max_total_adapter_bytes", max_total_bytes), _bytes_limit(share)):
        if limit is not None and num_bytes > limit:
            raise too_large(num_bytes, name, limit)
    of_owner = [copy for copy in copies if copy.owner == share.owner] if share.owner else []
    victims = policy(of_owner, *_beyond(of_owner, num_bytes, share))
    if victims is None:
        raise RegistryBusy(
            "the adapters in use by this key take its limit of host memory "
            f"(max_adapters={share.max_adapters}, max_adapter_bytes={share.max_bytes}).",
            of_key=True,
        )
    gone = {copy.digest for copy in victims}
    left = [copy for copy in copies if copy.digest not in gone]
    beyond = sum(copy.num_bytes for copy in left) + held[0] + num_bytes - max_total_bytes
    count = 0 if max_count is None else len(left) + held[1] + (num_bytes > 0) - max_count
    more = policy(left, beyond, count)
    if more is None:
        raise no_room()
    return gone | {copy.digest for copy in more}


def too_large(num_bytes: int, name: str, limit: int) -> AdapterRejected:
    """Return the error of a copy that never fits the limit of this name."""
    return AdapterRejected(f"it takes {num_bytes} bytes, the limit is {name}={limit}.")


def no_room() -> HostFull:
    """Return the error of a copy for which not enough others can be evicted now."""
    return HostFull(
        "adapters in use take all host memory for adapters now. Raise max_total_adapter_bytes (or "
        "max_cpu_loras where that is set), or ask again."
    )


def no_room_beside_pins(num_bytes: int) -> AdapterRejected:
    """Return the error of a copy that does not fit beside the pinned ones."""
    return AdapterRejected(
        f"it takes {num_bytes} bytes of host memory, of which pinned adapters leave less. Raise "
        "max_total_adapter_bytes (or max_cpu_loras where that is set), or unload a pinned adapter."
    )


def _bytes_limit(share: HostShare) -> tuple[str, int | None]:
    return "max_adapter_bytes", share.max_bytes


def _beyond(copies: Sequence[HostCopy], num_bytes: int, share: HostShare) -> tuple[int, int]:
    """Return the bytes and the copies that the caller would have beyond its limits."""
    total, count = sum(copy.num_bytes for copy in copies) + num_bytes, len(copies) + 1
    return (
        0 if share.max_bytes is None else total - share.max_bytes,
        0 if share.max_adapters is None else count - share.max_adapters,
    )


def copies_of(
    entries: Iterable[AdapterEntry],
    new: str,
    in_use: Collection[str],
    ledger: UseLedger,
    kept: Collection[str] = (),
) -> list[HostCopy]:
    """Return the weights of entries, one copy for each digest; those of `new` are fixed.

    Those that `kept` names are to be evicted last.
    """
    by_digest: dict[str, list[AdapterEntry]] = {}
    for entry in entries:
        by_digest.setdefault(entry.digest, []).append(entry)
    return [
        HostCopy(
            digest=digest,
            num_bytes=same[0].report.weight_bytes,
            last_use=ledger.last_use(digest),
            value=ledger.value(digest, same[0].report.weight_bytes),
            owner=same[0].owner,
            fixed=digest == new or digest in in_use or any(entry.pinned for entry in same),
            kept=any(entry.name in kept for entry in same),
        )
        for digest, same in by_digest.items()
    ]
