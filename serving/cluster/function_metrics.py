"""Metrics of isolated functions, by the function's name. No jax."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving.functions.handle import STATES

_START_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_HEAD_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class FunctionMetrics:
    """Counters of a front; a function's own counters begin anew with each of its processes."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._state = Gauge(
            "lora_jax:function_state",
            "1 for the state that the function is in.",
            ("function", "state"),
            registry=self.registry,
        )
        self._bytes = Gauge(
            "lora_jax:function_private_bytes",
            "Memory of the function's process alone when it was ready.",
            ("function",),
            registry=self.registry,
        )
        self._requests = Counter(
            "lora_jax:function_requests",
            "Requests that were answered, by class of status.",
            ("function", "status"),
            registry=self.registry,
        )
        self._start_seconds = Histogram(
            "lora_jax:function_start_seconds",
            "Seconds that requests waited for a function's process: its cold starts.",
            ("function",),
            buckets=_START_BUCKETS,
            registry=self.registry,
        )
        self._head_seconds = Histogram(
            "lora_jax:function_head_seconds",
            "Seconds to the head of the answer, with the wait for a process.",
            ("function",),
            buckets=_HEAD_BUCKETS,
            registry=self.registry,
        )

    def started(self, name: str, seconds: float) -> None:
        """A function's process has started for a request."""
        self._start_seconds.labels(name).observe(seconds)

    def head(self, name: str, seconds: float) -> None:
        """The head of an answer has come."""
        self._head_seconds.labels(name).observe(seconds)

    def answered(self, name: str, status: int) -> None:
        """A request has its whole answer."""
        self._requests.labels(name, f"{status // 100}xx").inc()

    def text(self, functions: Mapping[str, Any]) -> str:
        """Return the exposition text, with the functions' present states."""
        for name, function in functions.items():
            running, now = function.running, function.state
            for state in STATES:
                self._state.labels(name, state).set(state == now)
            about = {} if running is None else running.about
            self._bytes.labels(name).set(about.get("private_bytes", 0))
        return generate_latest(self.registry).decode()
