"""Speculation of an engine and its counters, with vLLM's names, read when they are scraped."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric

from serving.api.config import EngineConfig
from serving.engine.metrics.metrics import EngineMetrics
from serving.scheduling.speculation import DraftStats, Speculation


def make_speculation(config: EngineConfig, metrics: EngineMetrics) -> Speculation | None:
    """Return the speculation that the config asks for, its counters among the metrics."""
    settings = config.speculation
    if settings is None:
        return None
    speculation = Speculation(settings)
    metrics.registry.register(DraftCollector(metrics.labels, lambda: speculation.stats))
    return speculation


class DraftCollector:
    """A collector of drafts and of what came of them; only engines that speculate have one."""

    def __init__(self, labels: Mapping[str, str], stats: Callable[[], DraftStats]):
        self._labels, self._stats = dict(labels), stats

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not ask when we register."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield drafts, their tokens, and accepted ones, also by their place in the draft."""
        stats, values = self._stats(), list(self._labels.values())
        for name, text, value in (
            ("num_drafts", "Drafts sent.", stats.drafts),
            ("num_draft_tokens", "Tokens of drafts.", stats.tokens),
            ("num_accepted_tokens", "Tokens of drafts that were right.", stats.accepted),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=[*self._labels])
            counter.add_metric(values, value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that were right, by place.",
            labels=[*self._labels, "position"],
        )
        for position, count in enumerate(stats.accepted_per_place):
            places.add_metric([*values, str(position)], count)
        yield places
