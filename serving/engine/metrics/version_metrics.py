"""Prometheus metrics of versions of adapters: what a rollout compares. No jax."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Summary
from prometheus_client.core import GaugeMetricFamily, Metric

from lora_jax.adapters.versions import split
from serving.adapters.rollout import Rollout

_LABELS = ("adapter", "version")
REASONS = ("stop", "length", "abort", "error")


class VersionMetrics:
    """Counters by adapter and version, for versions that are loaded."""

    def __init__(self, registry: CollectorRegistry):
        self._ended = Counter(
            "lora_jax:adapter_version_requests",
            "Answers of a version by finish reason.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self._first = Summary(
            "lora_jax:adapter_version_ttft_seconds",
            "Seconds from arrival to the first token, or to a task head's answer, by version.",
            _LABELS,
            registry=registry,
        )
        self._scored = Counter(
            "lora_jax:adapter_version_scored_tokens",
            "Tokens of a version's answers that have log-probabilities.",
            _LABELS,
            registry=registry,
        )
        self._surprise = Counter(
            "lora_jax:adapter_version_negative_logprob",
            "Sum of the negative log-probabilities of a version's scored tokens.",
            _LABELS,
            registry=registry,
        )
        self._known: set[str] = set()

    def add(self, name: str) -> None:
        """Have series for a full name; one without a version has none."""
        adapter, version = split(name)
        if version is None or name in self._known:
            return
        for reason in REASONS:
            self._ended.labels(adapter, version, reason)
        for metric in (self._first, self._scored, self._surprise):
            metric.labels(adapter, version)
        self._known.add(name)

    def remove(self, name: str) -> None:
        """Have no series for this full name any more."""
        if name not in self._known:
            return
        adapter, version = split(name)
        for reason in REASONS:
            self._ended.remove(adapter, version, reason)
        for metric in (self._first, self._scored, self._surprise):
            metric.remove(adapter, version)
        self._known.discard(name)

    def ended(
        self,
        name: str,
        reasons: Iterable[str],
        ttft_s: float | None,
        logprob_sum: float,
        num_logprobs: int,
    ) -> None:
        """Record a request of a full name, unless the name has no version or is not loaded."""
        if name not in self._known:
            return
        labels = split(name)
        for reason in reasons:
            self._ended.labels(*labels, reason).inc()
        if ttft_s is not None:
            self._first.labels(*labels).observe(ttft_s)
        self._scored.labels(*labels).inc(num_logprobs)
        self._surprise.labels(*labels).inc(max(0.0, -logprob_sum))


class ShareCollector:
    """A collector of the shares as they are when it is asked."""

    def __init__(self, states: Callable[[], Mapping[str, Rollout]]):
        self._states = states

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not ask when we register."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the share of each version of each rollout."""
        shares = GaugeMetricFamily(
            "lora_jax:rollout_share", "Share of a version, 0 to 100.", labels=_LABELS
        )
        for adapter, state in self._states().items():
            for version, buckets in state.now.buckets.items():
                shares.add_metric([adapter, version], buckets / 100)
        yield shares
