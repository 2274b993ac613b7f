"""Prometheus metrics of an engine: vLLM's names, types, buckets and labels, and some of our own.

Gauges are read from the engine when they are scraped; counters and histograms are fed by the
engine's thread. Labels are only ever names that the operator or the registry chose.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lora_jax.adapters.rollout_guard import Outcome
from serving.api.images import ImageStats
from serving.engine.tier_metrics import TierMetrics
from serving.engine.version_metrics import VersionMetrics

OTHER = "other"  # label of an adapter that is not loaded any more

# Buckets: vLLM's, so that its dashboards find their boundaries.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
TTFT += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
ITL += (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0)
LATENCY += (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LOAD = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters and gauges of an engine, for metrics and the periodic log line."""

    running: int = 0  # sequences
    waiting: int = 0
    waiting_for_adapter: int = 0
    kv_usage: float = 0.0  # 0 to 1
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    preemptions: int = 0
    image_stats: ImageStats = dataclasses.field(default_factory=ImageStats)
    prompt_tokens: int = 0  # totals since the start
    generation_tokens: int = 0
    adapters_loaded: int = 0
    adapter_slots_used: int = 0
    adapter_slots_total: int = 0
    adapter_swaps: int = 0
    adapter_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by kind, host
    adapter_device_bytes: int = 0
    expert_page_bytes: int = 0  # physical pages behind the experts; 0 without ESFT
    resident_adapters: tuple[str, ...] = ()  # names, sorted
    waiting_adapters: tuple[str, ...] = ()  # names that requests wait for, sorted
    compilations_after_warmup: int = 0
    steps: int = 0
    # Of each op that was traced: [{implementation, declined: {name: reason}}], of this process.
    implementations: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens found in the prefix cache, 0 to 1."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclasses.dataclass(frozen=True)
class FinishedRequest:
    """Figures of a finished request, for the histograms; times in seconds."""

    adapter: str | None
    reasons: tuple[str, ...]  # finish reason of each choice
    num_prompt: int
    num_cached: int
    output_lengths: tuple[int, ...]
    max_tokens: int
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    preemptions: int
    logprob_sum: float = 0.0  # of the answers' tokens, where they were asked for
    num_logprobs: int = 0
    tier: str = ""  # where the adapter was when the request was queued

    def outcome(self) -> Outcome | None:
        """Return what a rollout's guard looks at; None for a request that its client ended."""
        if "abort" in self.reasons:
            return None
        first = self.first_token_s
        return Outcome(
            failed="error" in self.reasons,
            at_length="length" in self.reasons,
            ttft_s=None if first is None else first - self.arrival_s,
            logprob_sum=self.logprob_sum,
            num_logprobs=self.num_logprobs,
        )


def length_buckets(longest: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `longest`, vLLM's buckets for token counts."""
    buckets, scale = [], 1
    while scale <= longest:
        buckets += [scale * step for step in (1, 2, 5) if scale * step <= longest]
        scale *= 10
    return tuple(buckets)


class EngineMetrics:
    """The metrics of one engine, in a registry of its own (`registry`)."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, str],
        max_loras: int,
        stats: Callable[[], EngineStats] = EngineStats,
    ):
        """`stats` tells where the engine stands; see also `set_source`."""
        self.prompt_tokens = self.generation_tokens = 0  # totals, for the periodic log line
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauges = _Gauges(self._labels, cache_config, max_loras, stats)
        self.registry.register(self._gauges)
        self._make_counters()
        self._make_histograms(length_buckets(max_model_len))
        self._adapters: set[str] = {model_name}
        self._versions, self.tiers = VersionMetrics(self.registry), TierMetrics(self.registry)

    def set_source(self, stats: Callable[[], EngineStats]) -> None:
        """Read gauges from `stats` from now on; a scrape calls it in its own thread."""
        self._gauges.stats = stats

    def _counter(self, name: str, text: str, *extra: str) -> Counter:
        counter = Counter(name, text, (*self._labels, *extra), registry=self.registry)
        return counter if extra else counter.labels(**self._labels)

    def _make_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        by_source = self._counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self._by_source = {s: by_source.labels(**self._labels, source=s) for s in sources}
        success = self._counter(
            "vllm:request_success", "Requests by how they ended.", "finished_reason"
        )
        reasons = ("stop", "length", "abort", "error")
        self._success = {r: success.labels(**self._labels, finished_reason=r) for r in reasons}
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused before they entered the engine.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        for reason in REJECTIONS:
            self._rejections.labels(self._model_name, reason)
        self._by_adapter = {
            name: Counter(f"lora_jax:adapter_{name}", text, ("adapter",), registry=self.registry)
            for name, text in (
                ("requests", "Requests by adapter."),
                ("prompt_tokens", "Prompt tokens by adapter."),
                ("generation_tokens", "Tokens generated by adapter."),
            )
        }

    def _make_histograms(self, lengths: tuple[int, ...]) -> None:
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", text, tuple(self._labels), buckets=buckets, registry=self.registry
            ).labels(**self._labels)
            for name, text, buckets in (*_TIME_HISTOGRAMS, *_count_histograms(lengths))
        }
        self._load_seconds = Histogram(
            "lora_jax:adapter_load_seconds",
            "Time from the first row written to the adapter being resident.",
            buckets=LOAD,
            registry=self.registry,
        )

    def step_done(self, num_tokens: int) -> None:
        """Record a finished step."""
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def token_gap(self, seconds: float) -> None:
        """Record the time between two tokens of one choice."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def first_token(self, seconds: float) -> None:
        """Record the time from arrival to the first token of a request."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def tokens_generated(self, count: int) -> None:
        """Record tokens handed out in a step."""
        self.generation_tokens += count
        self._generation_tokens.inc(count)

    def rejected(self, reason: str) -> None:
        """Record a refused request; `reason` is one of REJECTIONS."""
        self._rejections.labels(self._model_name, reason).inc()

    def adapter_loaded_on_device(self, seconds: float) -> None:
        """Record how long a load into the slots took."""
        self._load_seconds.observe(seconds)

    def prompt_scheduled(self, computed: int, cached: int) -> None:
        """Record the prompt of a request when its first output goes out."""
        self.prompt_tokens += computed + cached
        self._prompt_tokens.inc(computed + cached)
        self._cached_tokens.inc(cached)
        self._by_source["local_compute"].inc(computed)
        self._by_source["local_cache_hit"].inc(cached)

    def set_adapters(self, names: Iterable[str]) -> None:
        """Keep series per adapter for these loaded names only."""
        names = tuple(names)
        self._versions.set_adapters(names)
        wanted = {*names, self._model_name}
        for name in self._adapters - wanted:
            for counter in self._by_adapter.values():
                counter.remove(name)
        for name in wanted - self._adapters:
            for counter in self._by_adapter.values():
                counter.labels(name)
        self._adapters = wanted

    def request_done(self, request: FinishedRequest) -> None:
        """Record a request whose choices have all ended."""
        for reason in request.reasons:
            self._success[reason].inc()
        generated = sum(request.output_lengths)
        name = request.adapter or self._model_name
        label = name if name in self._adapters else OTHER
        self._by_adapter["requests"].labels(label).inc()
        self._by_adapter["prompt_tokens"].labels(label).inc(request.num_prompt)
        self._by_adapter["generation_tokens"].labels(label).inc(generated)
        ttft_s = (
            None if request.first_token_s is None else request.first_token_s - request.arrival_s
        )
        sums = request.logprob_sum, request.num_logprobs
        self.tiers.ended(request.tier, ttft_s)
        self._versions.ended(name, request.reasons, ttft_s, *sums)
        for histogram, value in _observations(request):
            self._histograms[histogram].observe(value)


REJECTIONS = ("queue_full", "adapter_not_found", "invalid", "engine_dead")

_TIME_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Time from arrival to the first token.", TTFT),
    ("inter_token_latency_seconds", "Time between two tokens.", ITL),
    ("request_time_per_output_token_seconds", "Mean time per token after the first.", ITL),
    ("e2e_request_latency_seconds", "Time from arrival to the end.", LATENCY),
    ("request_queue_time_seconds", "Time spent waiting.", LATENCY),
    ("request_inference_time_seconds", "Time spent running.", LATENCY),
    ("request_prefill_time_seconds", "Time from admission to the first token.", LATENCY),
    ("request_decode_time_seconds", "Time from the first to the last token.", LATENCY),
    ("iteration_tokens_total", "Tokens in one step.", ITERATION),
)


def _count_histograms(lengths: tuple[int, ...]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return (
        ("request_prompt_tokens", "Prompt tokens of a request.", lengths),
        ("request_generation_tokens", "Tokens generated for a request.", lengths),
        ("request_max_num_generation_tokens", "Longest choice of a request.", lengths),
        ("request_params_n", "The parameter n.", (1, 2, 5, 10, 20)),
        ("request_params_max_tokens", "The parameter max_tokens.", lengths),
        ("request_prefill_kv_computed_tokens", "Prompt tokens computed.", lengths),
        ("request_num_preemptions", "Preemptions of a request.", (0, 1, 2, 5, 10, 20)),
    )


def _observations(request: FinishedRequest) -> list[tuple[str, float]]:
    """Return (histogram, value) pairs of a finished request; unknown times are left out."""
    longest = max(request.output_lengths, default=0)
    observations: list[tuple[str, float]] = [
        ("e2e_request_latency_seconds", request.finished_s - request.arrival_s),
        ("request_prompt_tokens", request.num_prompt),
        ("request_generation_tokens", sum(request.output_lengths)),
        ("request_max_num_generation_tokens", longest),
        ("request_params_n", len(request.output_lengths)),
        ("request_params_max_tokens", request.max_tokens),
        ("request_prefill_kv_computed_tokens", request.num_prompt - request.num_cached),
        ("request_num_preemptions", request.preemptions),
    ]
    scheduled, first = request.scheduled_s, request.first_token_s
    if scheduled is not None:
        observations.append(("request_queue_time_seconds", scheduled - request.arrival_s))
        observations.append(("request_inference_time_seconds", request.finished_s - scheduled))
    if scheduled is not None and first is not None:
        decode = request.finished_s - first
        observations.append(("request_prefill_time_seconds", first - scheduled))
        observations.append(("request_decode_time_seconds", decode))
        if longest > 1:
            observations.append(("request_time_per_output_token_seconds", decode / (longest - 1)))
    return observations


class _Gauges:
    """A collector that reads the engine when it is asked, so that no value is stale."""

    def __init__(
        self,
        labels: Mapping[str, str],
        cache_config: Mapping[str, str],
        max_loras: int,
        stats: Callable[[], EngineStats],
    ):
        self._labels, self._cache_config = dict(labels), dict(cache_config)
        self._max_loras, self.stats = max_loras, stats

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not call the engine when we register."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield every gauge, and the counters that the scheduler keeps itself."""
        stats = self.stats()
        yield from self._plain(stats)
        yield self._one("vllm:cache_config_info", "The KV cache.", self._cache_config, 1.0)
        yield self._lora_info(stats)
        reasons = {"capacity": stats.waiting - stats.waiting_for_adapter}
        reasons["deferred"] = stats.waiting_for_adapter
        yield self._family(
            "vllm:num_requests_waiting_by_reason", "Waiting, by what for.", "reason", reasons
        )
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._family("vllm:engine_sleep_state", "Always awake.", "sleep_state", states)
        kinds = GaugeMetricFamily(
            "lora_jax:adapter_bytes", "Host bytes of loaded adapters.", labels=["kind"]
        )
        for kind, size in (stats.adapter_bytes or {"lora": 0}).items():
            kinds.add_metric([kind], size)
        yield kinds

    def _plain(self, stats: EngineStats) -> Iterable[Metric]:
        for name, text, value in (
            ("vllm:num_requests_running", "Choices running.", stats.running),
            ("vllm:num_requests_waiting", "Choices waiting.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV pages held, 0 to 1.", stats.kv_usage),
        ):
            yield self._one(name, text, {}, value)
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found.", stats.prefix_hits),
            ("vllm:mm_cache_queries", "Images looked up.", stats.image_stats.queries),
            ("vllm:mm_cache_hits", "Images found on the device.", stats.image_stats.hits),
            ("vllm:num_preemptions", "Preemptions by recompute.", stats.preemptions),
        ):
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        for name, text, value in (
            ("adapter_slots_used", "Adapters on the device.", stats.adapter_slots_used),
            ("adapter_slots_total", "Adapter slots.", stats.adapter_slots_total),
            ("encoder_rows_used", "Tokens of images kept.", stats.image_stats.rows_used),
            ("encoder_rows_total", "Room for them.", stats.image_stats.rows_total),
            ("adapters_loaded", "Adapters in the registry.", stats.adapters_loaded),
            ("adapter_device_bytes", "Rank rows and experts in use.", stats.adapter_device_bytes),
            ("expert_page_bytes", "Pages behind base and ESFT experts.", stats.expert_page_bytes),
            (
                "compilations_after_warmup",
                "Programs compiled by the engine after its start.",
                stats.compilations_after_warmup,
            ),
        ):
            yield GaugeMetricFamily(f"lora_jax:{name}", text, value=value)
        yield CounterMetricFamily(
            "lora_jax:adapter_swaps", "Adapters written to a slot.", value=stats.adapter_swaps
        )

    def _one(self, name: str, text: str, extra: Mapping[str, str], value: float) -> Metric:
        labels = {**extra, **self._labels}
        gauge = GaugeMetricFamily(name, text, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        return gauge

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            gauge.add_metric([*self._labels.values(), key], value)
        return gauge

    def _lora_info(self, stats: EngineStats) -> Metric:
        """One series, whatever happens: gateways read only the newest."""
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters waited for and resident.", labels=labels
        )
        names = (",".join(stats.waiting_adapters), ",".join(stats.resident_adapters))
        gauge.add_metric([str(max(1, self._max_loras)), *names], time.time())
        return gauge
