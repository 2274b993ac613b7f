"""Grafana dashboard of the server: `python deploy/grafana/dashboard.py` writes lora-jax.json.

The first rows are what vLLM's dashboard shows, then come the adapters.
"""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_OF = 'instance=~"$instance", model_name=~"$model"'
_HERE = 'instance=~"$instance"'
_ADAPTER = 'instance=~"$instance", adapter=~"$adapter"'
_QUANTILES = (0.5, 0.9, 0.99)
_SOURCE = {"type": "prometheus", "uid": "${source}"}

Series = tuple[str, str]  # expression, legend


def rate(metric: str, by: str = "", of: str = _OF) -> str:
    """Return the rate of a counter, summed."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{of}}}[$__rate_interval]))"


def quantiles(metric: str, by: str = "", of: str = _OF) -> list[Series]:
    """Return quantiles of a histogram."""
    labels = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} " if by else ""
    buckets = rate(f"{metric}_bucket", labels, of)
    shown = _QUANTILES[-1:] if by else _QUANTILES
    return [(f"histogram_quantile({q}, {buckets})", f"{legend}P{q * 100:g}") for q in shown]


def each(metric: str, by: str, of: str = _HERE) -> list[Series]:
    """Return a gauge by one of its labels."""
    return [(f"sum by ({by}) ({metric}{{{of}}})", f"{{{{{by}}}}}")]


def rates(metric: str, by: str, of: str = _OF) -> list[Series]:
    """Return the rate of a counter by one of its labels."""
    return [(rate(metric, by, of), f"{{{{{by}}}}}")]


# Rows of panels: title, unit, series.
ROWS: list[tuple[str, list[tuple[str, str, list[Series]]]]] = [
    (
        "Requests",
        [
            ("E2E request latency", "s", quantiles("vllm:e2e_request_latency_seconds")),
            (
                "Token throughput",
                "short",
                [
                    (rate("vllm:prompt_tokens_total"), "prompt tokens/s"),
                    (rate("vllm:generation_tokens_total"), "generation tokens/s"),
                ],
            ),
            ("Inter-token latency", "s", quantiles("vllm:inter_token_latency_seconds")),
            ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
            (
                "Scheduler state",
                "short",
                [
                    (f"sum(vllm:num_requests_running{{{_OF}}})", "running"),
                    (f"sum(vllm:num_requests_waiting{{{_OF}}})", "waiting"),
                ],
            ),
            (
                "KV cache usage",
                "percentunit",
                [(f"vllm:kv_cache_usage_perc{{{_OF}}}", "{{instance}} {{engine}}")],
            ),
            ("Finish reason", "reqps", rates("vllm:request_success_total", "finished_reason")),
            ("Queue time", "s", quantiles("vllm:request_queue_time_seconds")),
            ("Prompt length", "short", quantiles("vllm:request_prompt_tokens")),
            ("Generation length", "short", quantiles("vllm:request_generation_tokens")),
            (
                "Prefix cache hit rate",
                "percentunit",
                [
                    (
                        f"{rate('vllm:prefix_cache_hits_total')} / "
                        f"{rate('vllm:prefix_cache_queries_total')}",
                        "hits",
                    )
                ],
            ),
            ("Preemptions", "cps", [(rate("vllm:num_preemptions_total"), "preemptions/s")]),
        ],
    ),
    (
        "Adapters",
        [
            (
                "Requests by adapter",
                "reqps",
                rates("lora_jax:adapter_requests_total", "adapter", _ADAPTER),
            ),
            (
                "Generated tokens/s by adapter",
                "short",
                rates("lora_jax:adapter_generation_tokens_total", "adapter", _ADAPTER),
            ),
            (
                "Prompt tokens/s by adapter",
                "short",
                rates("lora_jax:adapter_prompt_tokens_total", "adapter", _ADAPTER),
            ),
            (
                "Weighted sums, for each of their adapters",
                "reqps",
                rates("lora_jax:adapter_composed_requests_total", "adapter", _ADAPTER),
            ),
            (
                "Adapter slots",
                "short",
                [
                    (f"sum(lora_jax:adapter_slots_used{{{_HERE}}})", "used"),
                    (f"sum(lora_jax:adapter_slots_total{{{_HERE}}})", "slots"),
                    (f"sum(lora_jax:adapters_loaded{{{_HERE}}})", "loaded in host memory"),
                ],
            ),
            (
                "Waiting, by what for",
                "short",
                each("vllm:num_requests_waiting_by_reason", "reason", _OF),
            ),
            (
                "Adapter swaps",
                "cps",
                [(rate("lora_jax:adapter_swaps_total", of=_HERE), "swaps/s")],
            ),
            (
                "Where adapters were found",
                "reqps",
                rates("lora_jax:adapter_tier_hits_total", "tier", _HERE),
            ),
            (
                "Time to first token by tier",
                "s",
                quantiles("lora_jax:adapter_tier_ttft_seconds", "tier", _HERE),
            ),
            ("Load to device", "s", quantiles("lora_jax:adapter_load_seconds", of=_HERE)),
            ("Read from disk", "s", quantiles("lora_jax:adapter_read_seconds", of=_HERE)),
            (
                "Adapter memory",
                "bytes",
                [
                    *each("lora_jax:adapter_bytes", "kind"),
                    (f"sum(lora_jax:adapter_device_bytes{{{_HERE}}})", "on the device"),
                ],
            ),
            (
                "Requests by version",
                "reqps",
                [
                    (
                        rate(
                            "lora_jax:adapter_version_requests_total", "adapter, version", _ADAPTER
                        ),
                        "{{adapter}} {{version}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Health",
        [
            ("HTTP answers", "reqps", rates("http_requests_total", "status", _HERE)),
            ("Refused requests", "reqps", rates("vllm:admission_rejections_total", "reason")),
            ("Wrong keys", "reqps", rates("lora_jax:failed_keys_total", "why", _HERE)),
            (
                "Compilations after the start",
                "short",
                [(f"lora_jax:compilations_after_warmup{{{_HERE}}}", "{{instance}}")],
            ),
            (
                "Resident memory",
                "bytes",
                [(f"process_resident_memory_bytes{{{_HERE}}}", "{{instance}}")],
            ),
            ("Tokens in a step", "short", quantiles("vllm:iteration_tokens_total")),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels, y = [], 0
    for title, row in ROWS:
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        for number, (name, unit, series) in enumerate(row):
            at = {"h": 8, "w": 8, "x": number % 3 * 8, "y": y + 1 + number // 3 * 8}
            panels.append(_panel(name, unit, series, at))
        y += 1 + -(-len(row) // 3) * 8
    numbered = [{"id": number, **panel} for number, panel in enumerate(panels, 1)]
    return {
        "title": "lora-jax",
        "uid": "lora-jax",
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": numbered,
    }


def _panel(title: str, unit: str, series: list[Series], at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend}
        for n, (expression, legend) in enumerate(series)
    ]
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    """Return what a reader chooses: the data source, and whose series are shown."""
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    chosen = (
        ("instance", "Instance", "label_values(vllm:num_requests_running, instance)"),
        ("model", "Model", "label_values(vllm:num_requests_running, model_name)"),
        ("adapter", "Adapter", "label_values(lora_jax:adapter_requests_total, adapter)"),
    )
    common = {"type": "query", "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*"}
    common |= {
        "datasource": _SOURCE,
        "current": {"value": "$__all"},
    }
    return [source, *({"name": n, "label": label, "query": q, **common} for n, label, q in chosen)]


if __name__ == "__main__":
    (HERE / "lora-jax.json").write_text(json.dumps(dashboard(), indent=1) + "\n")
