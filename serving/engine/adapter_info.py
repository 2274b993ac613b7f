"""Descriptions of loaded adapters for callers of the engine. No jax."""

import dataclasses
from collections.abc import Container

from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter
from lora_jax.adapters.weights import AdapterReport


@dataclasses.dataclass(frozen=True)
class AdapterInfo:
    """Description of one loaded adapter."""

    name: str
    kind: str
    rank: int  # largest rank of any site; 0 for ESFT
    bytes: int  # weights on the host
    resident: bool  # on the device
    pinned: bool
    digest: str  # sha256 of its files
    report: AdapterReport


def adapter_info(entry: AdapterEntry | EvictedAdapter, resident: Container[str]) -> AdapterInfo:
    """Return the description of an adapter; `resident` are the digests on the device."""
    return AdapterInfo(
        name=entry.name,
        kind=entry.kind,
        rank=entry.report.max_rank,
        bytes=entry.report.weight_bytes,
        resident=entry.digest in resident,
        pinned=entry.pinned,
        digest=entry.digest,
        report=entry.report,
    )
