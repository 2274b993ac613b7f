"""Prometheus metrics of an engine: vLLM's names, types, buckets and labels, and some of our own.

Gauges are read from the engine when they are scraped. What steps and requests gave is noted at
once, and counted when the engine's thread has time for it, or before a scrape. Labels are only ever
names that the operator or the registry chose.
"""

import collections
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from lora_jax.adapters.composition import names_in
from serving.engine.metrics.gauges import Gauges
from serving.engine.metrics.histograms import (
    LOAD,
    TIME_HISTOGRAMS,
    BulkHistogram,
    FinishedRequest,
    count_histograms,
    length_buckets,
    observations,
)
from serving.engine.metrics.stats import EngineStats
from serving.engine.metrics.tier_metrics import TierMetrics
from serving.engine.metrics.version_metrics import VersionMetrics

OTHER = "other"  # label of an adapter that is not loaded any more
COMPOSED = "composed"  # label of weighted sums, of which there may be any number
REJECTIONS = ("queue_full", "adapter_not_found", "invalid", "engine_dead")


class _Settles:
    """A collector of nothing, before whose turn in a scrape all notes are counted."""

    def __init__(self, settle: Callable[[], None]):
        self._settle = settle

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not ask when we register."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Count what is noted; return nothing."""
        self._settle()
        return ()


class EngineMetrics:
    """The metrics of one engine, in a registry of its own (`registry`).

    Counting takes as long as all the rest of a short answer, so callers do not wait for it: any
    thread may note (`later`), and `settle` counts.
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, str],
        max_loras: int,
        stats: Callable[[], EngineStats] = EngineStats,
    ):
        """`stats` tells where the engine stands; see also `set_source`."""
        self.registry = CollectorRegistry()
        self._notes: collections.deque[tuple[Callable[..., None], tuple[Any, ...]]] = (
            collections.deque()
        )
        self._settling = threading.Lock()
        self.registry.register(_Settles(self.settle))  # the first one: others count after it
        self._model_name = model_name
        self.labels = {"model_name": model_name, "engine": "0"}
        self._gauges = Gauges(self.labels, cache_config, max_loras, stats)
        self.registry.register(self._gauges)
        self._lengths = length_buckets(max_model_len)
        self._naming = threading.Lock()  # adapters may come while requests are forgotten
        self._load_seconds = Histogram(
            "lora_jax:adapter_load_seconds",
            "Seconds from the first row that is written to the adapter being resident.",
            buckets=LOAD,
            registry=self.registry,
        )
        self._begin()
        self._versions, self.tiers = VersionMetrics(self.registry), TierMetrics(self.registry)

    def set_source(self, stats: Callable[[], EngineStats]) -> None:
        """Read gauges from `stats` from now on; a scrape calls it in its own thread."""
        self._gauges.stats = stats

    def later(self, count: Callable[..., None], *values: Any) -> None:
        """Have `count(*values)` called by the next `settle`, in the order of these calls."""
        self._notes.append((count, values))

    @property
    def has_notes(self) -> bool:
        """True if `settle` has anything to do."""
        return bool(self._notes)

    def settle(self) -> None:
        """Count all that is noted; any thread may call it."""
        with self._settling:
            while self._notes:
                count, values = self._notes.popleft()
                count(*values)

    def forget_requests(self) -> None:
        """Count requests and tokens from zero again; for an engine that has none."""
        self.settle()
        with self._naming:
            known = tuple(self._adapters)
            for name in known:
                self._versions.remove(name)
            self.registry.unregister(self._counts)
            self._begin()
            self.tiers.forget_requests()
            for name in known:
                self._add_adapter(name)

    def _begin(self) -> None:
        """Have counters of requests, all zero, in a registry of their own within `registry`."""
        self.prompt_tokens = self.generation_tokens = 0  # totals, for the periodic log line
        self.requests_done = 0
        self._gaps: dict[float, int] = {}  # seconds -> tokens, of the step that is handed out
        self._counts = CollectorRegistry()
        self.registry.register(self._counts)
        self._make_counters()
        self._make_histograms(self._lengths)
        self._adapters: set[str] = {self._model_name}

    def _counter(self, name: str, text: str, *extra: str) -> Counter:
        counter = Counter(name, text, (*self.labels, *extra), registry=self._counts)
        return counter if extra else counter.labels(**self.labels)

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        by_source = self._counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source: computed or from a cache.",
            "source",
        )
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self._by_source = {s: by_source.labels(**self.labels, source=s) for s in sources}
        success = self._counter(
            "vllm:request_success", "Requests by finish reason.", "finished_reason"
        )
        reasons = ("stop", "length", "abort", "error")
        self._success = {r: success.labels(**self.labels, finished_reason=r) for r in reasons}
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests rejected before they entered the engine, by reason.",
            ("model_name", "reason"),
            registry=self._counts,
        )
        for reason in REJECTIONS:
            self._rejections.labels(self._model_name, reason)
        self._by_adapter = {
            name: Counter(f"lora_jax:adapter_{name}", text, ("adapter",), registry=self._counts)
            for name, text in (
                ("requests", "Requests by adapter."),
                ("prompt_tokens", "Prompt tokens by adapter."),
                ("generation_tokens", "Tokens generated by adapter."),
                ("composed_requests", "Requests of weighted sums, for each of their adapters."),
            )
        }

    def _make_histograms(self, lengths: tuple[int, ...]) -> None:
        self._histograms = {
            name: BulkHistogram(
                f"vllm:{name}", text, tuple(self.labels), buckets=buckets, registry=self._counts
            ).labels(**self.labels)
            for name, text, buckets in (*TIME_HISTOGRAMS, *count_histograms(lengths))
        }

    def step_done(self, num_tokens: int) -> None:
        """Record a finished step."""
        self.later(self._histograms["iteration_tokens_total"].observe, num_tokens)

    def token_gap(self, seconds: float) -> None:
        """Record the time between two tokens of one choice, with the step's `tokens_generated`.

        Most gaps of a step are equal: tokens of a step share their time, and so do those before.
        """
        self._gaps[seconds] = self._gaps.get(seconds, 0) + 1

    def first_token(self, seconds: float) -> None:
        """Record the time from arrival to the first token of a request."""
        self.later(self._histograms["time_to_first_token_seconds"].observe, seconds)

    def tokens_generated(self, count: int) -> None:
        """Record tokens handed out in a step, and the gaps before them."""
        self.generation_tokens += count
        if self._gaps:
            gaps, self._gaps = self._gaps, {}
            self.later(self._count_gaps, gaps)
        if count:
            self.later(self._generation_tokens.inc, count)

    def _count_gaps(self, gaps: Mapping[float, int]) -> None:
        for seconds, equal in gaps.items():
            self._histograms["inter_token_latency_seconds"].observe_equal(seconds, equal)

    def rejected(self, reason: str) -> None:
        """Record a refused request; `reason` is one of REJECTIONS."""
        self._rejections.labels(self._model_name, reason).inc()

    def adapter_loaded_on_device(self, seconds: float) -> None:
        """Record how long a load into the slots took."""
        self._load_seconds.observe(seconds)

    def prompt_scheduled(self, computed: int, cached: int) -> None:
        """Record the prompt of a request when its first output goes out."""
        self.prompt_tokens += computed + cached
        self.later(self._count_prompt, computed, cached)

    def _count_prompt(self, computed: int, cached: int) -> None:
        self._prompt_tokens.inc(computed + cached)
        self._cached_tokens.inc(cached)
        self._by_source["local_compute"].inc(computed)
        self._by_source["local_cache_hit"].inc(cached)

    def add_adapter(self, name: str) -> None:
        """Have series for a name; one that is known keeps its series."""
        with self._naming:
            self._add_adapter(name)

    def _add_adapter(self, name: str) -> None:
        if name in self._adapters:
            return
        self._versions.add(name)
        for counter in self._by_adapter.values():
            counter.labels(name)
        self._adapters.add(name)

    def remove_adapter(self, name: str) -> None:
        """Have no series for this name any more."""
        self.settle()  # its last requests count as its own
        with self._naming:
            if name not in self._adapters or name == self._model_name:
                return
            self._versions.remove(name)
            for counter in self._by_adapter.values():
                counter.remove(name)
            self._adapters.discard(name)

    def request_done(self, request: FinishedRequest) -> None:
        """Count a request whose choices have all ended, now."""
        for reason in request.reasons:
            self._success[reason].inc()
        generated = sum(request.output_lengths)
        name, parts = request.adapter or self._model_name, names_in(request.adapter or "")
        label = name if name in self._adapters else COMPOSED if parts else OTHER
        for part in self._adapters.intersection(parts):
            self._by_adapter["composed_requests"].labels(part).inc()
        self._by_adapter["requests"].labels(label).inc()
        self._by_adapter["prompt_tokens"].labels(label).inc(request.num_prompt)
        self._by_adapter["generation_tokens"].labels(label).inc(generated)
        sums = request.logprob_sum, request.num_logprobs
        self.tiers.ended(request.tier, request.ttft_s)
        self._versions.ended(name, request.reasons, request.ttft_s, *sums)
        for histogram, value in observations(request):
            self._histograms[histogram].observe(value)
        self.requests_done += 1
