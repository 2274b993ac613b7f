"""Histograms of finished requests: vLLM's names and buckets, and one request's values."""

import bisect
import dataclasses

from prometheus_client import Histogram

from serving.adapters.rollout_guard import Outcome

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
    bad_request: bool = False  # an error of the request alone
    of_server: bool = False  # an error that says nothing of the adapter
    by_head: bool = False  # a task head answers, which gives no token

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, or to a head's answer; None: there was none."""
        if self.first_token_s is not None:
            return self.first_token_s - self.arrival_s
        has_answer = self.by_head and not {"abort", "error"}.intersection(self.reasons)
        return self.finished_s - self.arrival_s if has_answer else None

    def outcome(self) -> Outcome | None:
        """Return what a rollout's guard looks at.

        None for a request that its client ended, or that no version could have answered: the
        request or the server is why, as where all adapter slots were taken.
        """
        if "abort" in self.reasons or self.bad_request or self.of_server:
            return None
        return Outcome(
            failed="error" in self.reasons,
            at_length="length" in self.reasons,
            ttft_s=self.ttft_s,
            logprob_sum=self.logprob_sum,
            num_logprobs=self.num_logprobs,
        )


class BulkHistogram(Histogram):
    """A histogram that takes equal values together: one costs as much as a thousand."""

    def observe_equal(self, value: float, count: int) -> None:
        """Do what `count` calls of `observe` with the value do."""
        self._raise_if_not_observable()
        self._sum.inc(value * count)
        self._buckets[bisect.bisect_left(self._upper_bounds, value)].inc(count)


def length_buckets(longest: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `longest`, vLLM's buckets for token counts."""
    buckets, scale = [], 1
    while scale <= longest:
        buckets += [scale * step for step in (1, 2, 5) if scale * step <= longest]
        scale *= 10
    return tuple(buckets)


TIME_HISTOGRAMS = (
    ("time_to_first_token_seconds", "Seconds from arrival to the first token.", TTFT),
    ("inter_token_latency_seconds", "Seconds between two tokens of an answer.", ITL),
    (
        "request_time_per_output_token_seconds",
        "Mean seconds per output token after the first, of a request.",
        ITL,
    ),
    ("e2e_request_latency_seconds", "Seconds from arrival to the end of a request.", LATENCY),
    ("request_queue_time_seconds", "Seconds from arrival to admission.", LATENCY),
    ("request_inference_time_seconds", "Seconds from admission to the end of a request.", LATENCY),
    ("request_prefill_time_seconds", "Seconds from admission to the first token.", LATENCY),
    (
        "request_decode_time_seconds",
        "Seconds from the first to the last token of a request.",
        LATENCY,
    ),
    ("iteration_tokens_total", "Tokens in one step.", ITERATION),
)


def count_histograms(lengths: tuple[int, ...]) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Return (name, text, buckets) of the histograms that count tokens, choices and the like."""
    return (
        ("request_prompt_tokens", "Prompt tokens of a request.", lengths),
        ("request_generation_tokens", "Tokens generated for a request.", lengths),
        (
            "request_max_num_generation_tokens",
            "Tokens of the longest answer of a request.",
            lengths,
        ),
        ("request_params_n", "Parameter n of requests.", (1, 2, 5, 10, 20)),
        ("request_params_max_tokens", "Parameter max_tokens of requests.", lengths),
        (
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that a request computed, without cached ones.",
            lengths,
        ),
        ("request_num_preemptions", "Preemptions of a request.", (0, 1, 2, 5, 10, 20)),
    )


def observations(request: FinishedRequest) -> list[tuple[str, float]]:
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
