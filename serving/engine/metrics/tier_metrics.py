"""Prometheus metrics of adapter tiers: where a request finds its adapter, and what that takes."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.registry import AdapterRegistry

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0)
_READ = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


def tier_of(
    entry: AdapterEntry | None, registry: AdapterRegistry, is_resident: Callable[[str], bool]
) -> str:
    """Return where a request finds its adapter; nothing for the base model."""
    if entry is None:
        return ""
    was_read = registry.take_read(entry.digest)  # asked in any case: it counts for one request
    return DEVICE if is_resident(entry.digest) else DISK if was_read else HOST


class TierMetrics:
    """Counters by tier; series of all tiers are there from the start."""

    def __init__(self, registry: CollectorRegistry):
        self._hits = Counter(
            "lora_jax:adapter_tier_hits",
            "Requests by the tier of their adapter when they were queued: device, host or disk.",
            ("tier",),
            registry=registry,
        )
        self._first = Histogram(
            "lora_jax:adapter_tier_ttft_seconds",
            "Seconds from arrival to the first token, or to a task head's answer, by the tier of "
            "the adapter at queueing.",
            ("tier",),
            buckets=_TTFT,
            registry=registry,
        )
        self._reads = Histogram(
            "lora_jax:adapter_read_seconds",
            "Seconds to read an adapter's files into host memory.",
            buckets=_READ,
            registry=registry,
        )
        self.forget_requests()

    def forget_requests(self) -> None:
        """Count requests from zero again; reads of files stay counted."""
        for metric in (self._hits, self._first):
            metric.clear()
            for tier in TIERS:
                metric.labels(tier)

    def queued(self, tier: str) -> None:
        """Record a request for an adapter that is in this tier."""
        self._hits.labels(tier).inc()

    def ended(self, tier: str, ttft_s: float | None) -> None:
        """Record the first token of a request; no tier is the base model."""
        if tier and ttft_s is not None:
            self._first.labels(tier).observe(ttft_s)

    def read(self, seconds: float) -> None:
        """Record one read from the disk."""
        self._reads.observe(seconds)
