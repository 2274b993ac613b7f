"""Figures of a simulated run: latencies, violations, hits, and costs at published prices."""

import statistics
from typing import Any

from bench.functions.device import Device, Request
from bench.functions.simulator import Simulation
from serving.functions.policies.prices import (
    Usage,
    always_on,
    cost_effectiveness,
    dollars,
    published_bill,
    share_backbone,
)

_STEPS = 20  # of a distribution


def figures(simulation: Simulation, seconds: float) -> dict[str, Any]:
    """Return a table's row. Costs are with and without the backbone's idle time."""
    slo = [(f, r) for f in simulation.functions for r in f.done]
    ttft = [r.first - r.arrival for _, r in slo]
    e2e = [r.last - r.arrival for _, r in slo]
    late = sum(r.first - r.arrival > f.model.slo_s for f, r in slo)
    billed, idle = _usage(simulation, seconds)
    cost, mean = dollars(billed), statistics.fmean(e2e)
    return {
        "system": simulation.system.name,
        "requests": len(slo),
        "mean_ttft_s": statistics.fmean(ttft),
        "p95_ttft_s": sorted(ttft)[int(0.95 * len(ttft))],
        "mean_e2e_s": mean,
        "mean_tpot_s": statistics.fmean(_per_token(simulation, r) for _, r in slo),
        "ttft_quantiles_s": _quantiles(ttft),
        "slo_violations": late / len(slo),
        "pre_loading_hits": 1 - sum(f.cold for f in simulation.functions) / len(slo),
        "dollars": cost,
        "dollars_with_idle_backbone": cost + dollars(idle),
        "dollars_whole_device": dollars(_whole_devices(simulation, seconds)),
        "published_bill": _published_bill(simulation, mean),
        "cost_effectiveness": cost_effectiveness(mean, cost),
        "seconds_by_part": simulation.load_s | {"waiting and prefill": sum(ttft)},
    }


def _published_bill(simulation: Simulation, mean_e2e_s: float) -> float | None:
    """Return the bill of a serverless system as table 1's costs are made; None for others."""
    system = simulation.system
    if system.always_on:
        return None
    each = len(simulation.functions) // len(simulation.times.models)
    return published_bill(mean_e2e_s, each if system.shares else 1)


def _per_token(simulation: Simulation, request: Request) -> float:
    return (request.last - request.first) / (simulation.times.answer_tokens - 1)


def _quantiles(values: list[float]) -> list[float]:
    """Return the values at 0%, 5%, ..., 100%: a plot's cumulative distribution."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[round(last * step / _STEPS)], 4) for step in range(_STEPS + 1)]


def _whole_devices(simulation: Simulation, seconds: float) -> Usage:
    """Return the usage where whoever has weights on a device pays for all of its memory.

    So platforms bill that give a function a device of its own. A shared backbone's device is
    likewise billed whole to its functions, active while one of them works, else idle.
    """
    total, gb = Usage(), simulation.times.device_gb
    for device in simulation.devices:
        spans = [(0.0, seconds)] if simulation.system.always_on else device.backbone_spans
        for begin, end in spans:
            busy = [
                (max(start, begin), min(stop, end))
                for function in device.functions
                for start, stop in function.busy
                if start < end and stop > begin
            ]
            active = end - begin if simulation.system.always_on else _covered(busy)
            idle = end - begin - active
            total += Usage(gpu_gb_active_s=gb * active, gpu_gb_idle_s=gb * idle)
    return total


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return how long at least one span lasts."""
    covered, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


def _usage(simulation: Simulation, seconds: float) -> tuple[Usage, Usage]:
    """Return what functions are billed for, and the backbones' idle time, the operator's."""
    times, system = simulation.times, simulation.system
    if system.always_on:
        gb = sum(_resident_gb(device) for device in simulation.devices)
        return always_on(gb, seconds), Usage()
    billed, idle = Usage(), Usage()
    for device in simulation.devices:
        shared, unused = _backbone(device)
        if not system.shares:  # its only function's, also while it idles
            billed += Usage(gpu_gb_active_s=shared, gpu_gb_idle_s=unused)
        else:
            billed += Usage(gpu_gb_active_s=shared)
            idle += Usage(gpu_gb_idle_s=unused)
        for function in device.functions:
            busy = sum(stop - start for start, stop in function.busy)
            billed += Usage(
                gpu_gb_active_s=function.active_gb_s,
                gpu_gb_idle_s=function.idle_gb_s,
                vcpu_active_s=busy,
                memory_gb_s=busy * times.libraries_gb,
                calls=len(function.done),
            )
    return billed, idle


def _backbone(device: Device) -> tuple[float, float]:
    """Return GB-seconds of a device's backbone while requests ran, and while none did."""
    active = idle = 0.0
    for begin, end in device.backbone_spans:
        clipped = {
            f.name: [
                (max(start, begin), min(stop, end))
                for start, stop in f.busy
                if start < end and stop > begin
            ]
            for f in device.functions
        }
        shares = share_backbone(device.model.backbone_gb, (begin, end), clipped)
        active += sum(shares.active.values())
        idle += shares.idle
    return active, idle


def _resident_gb(device: Device) -> float:
    """Return what an engine holds all the time: weights, its functions' parts, a batch's KV."""
    model = device.model
    parts = sum(device.own_gb(function) for function in device.functions)
    return model.backbone_gb + parts + model.largest_batch * model.kv_gb
