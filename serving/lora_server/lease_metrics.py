"""Prometheus metrics of a LoRA Server: where leased adapters were, and what loads take. No jax."""

from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PartLoad(NamedTuple):
    """What the load of one rank's part of an adapter took; `read_s` 0: it was in host memory."""

    read_s: float
    load_s: float  # all of it


class LeaseMetrics:
    """Counters of a coordinator; series of all tiers are there from the start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._hits = Counter(
            "lora_jax:lora_server_tier_hits",
            "Leases of adapters by the tier where a LoRA Server has them: device, host or disk.",
            ("tier",),
            registry=self.registry,
        )
        self._reads = Histogram(
            "lora_jax:lora_server_read_seconds",
            "Seconds until the last rank of a LoRA Server had read its part of an adapter.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._loads = Histogram(
            "lora_jax:lora_server_load_seconds",
            "Seconds until requests could use an adapter on all ranks of a LoRA Server.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        for tier in TIERS:
            self._hits.labels(tier)

    def held(self) -> None:
        """Record a lease of an adapter that is on the ranks."""
        self._hits.labels(DEVICE).inc()

    def loaded(self, parts: Sequence[PartLoad]) -> None:
        """Record a lease for which the ranks have loaded their parts; the slowest one counts."""
        read_s = max((part.read_s for part in parts), default=0.0)
        self._hits.labels(DISK if read_s else HOST).inc()
        if read_s:
            self._reads.observe(read_s)
        self._loads.observe(max((part.load_s for part in parts), default=0.0))

    def text(self) -> str:
        """Return the exposition text."""
        return generate_latest(self.registry).decode()
