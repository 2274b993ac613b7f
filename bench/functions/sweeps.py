"""Sweeps of the simulator: load, memory, batches, a model over several devices, and what is billed.

Each is a figure or a table of ServerlessLoRA (arXiv 2505.14468), by models of the systems.
"""

import csv
import dataclasses
import datetime
import gzip
import random
from pathlib import Path
from typing import Any

from bench.functions.run import simulate
from bench.functions.systems import ABLATIONS, SYSTEMS, System
from bench.functions.times import Model, Times
from bench.functions.traces import CONVERSATIONS, read_classes, thinned
from serving.functions.policies.batching import PrefillTime

SHARES = (0.125, 0.25, 0.5, 1.0)  # of the calls: figure 11
MEMORIES_GB = (28.0, 32.0, 40.0, 48.0)  # of a device: figure 14
# Of the calls of the traces: with these a request takes about as long as in Table 1. All calls of
# the "bursty" windows overload every system, which no system of Table 1 was.
PAPERS_SHARE = 0.125
TIGHT_GB = 28.0  # 13B's backbone, three functions of it, and nothing else
PAPERS_BATCH = 32  # of private functions in Table 2
KEEP_ALIVE_S = (60.0, 300.0, 600.0)
FUNCTIONS = (1, 4)  # of one backbone: figures 2a and 2b
# Figure 12: weights of 140 GB over four cards taken as one device; times of prefill and decoding
# are assumptions of the order of its bars.
LARGE = Model("70b", 140.0, PrefillTime(1.5, 0.1), 7.5, 0.06, 0.33, 32)
_SHOWN = ("mean_ttft_s", "mean_e2e_s", "dollars", "dollars_whole_device")
_SHOWN += ("published_bill", "cost_effectiveness")


def sweeps(traces: Path, times: Times) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every sweep; all under "normal" arrivals but the large model's."""
    normal = read_classes(traces)["normal"]
    return {
        "one_and_four": _one_and_four(normal, times),
        "load": _load(normal, times),
        "memory": _memory(normal, times),
        "keep_alive": _keep_alive(normal, times),
        "large": _large(read_llm(traces / CONVERSATIONS, 4), times),
    } | papers_load(traces, times)


def papers_load(traces: Path, times: Times) -> dict[str, list[dict[str, Any]]]:
    """Return rows at the load and in the memory that the paper's own numbers speak of: Table 1 with
    an eighth of the calls, Table 3 in devices without room to spare, Table 2 from the batch that
    its private functions had."""
    few = {name: _thinned(calls, PAPERS_SHARE) for name, calls in read_classes(traces).items()}
    tight = dataclasses.replace(times, device_gb=TIGHT_GB, devices_per_model=1)
    return {
        "papers_load": [
            {"arrivals": name} | _row(system, times, calls)
            for name, calls in few.items()
            for system in SYSTEMS
        ],
        "tight_switches": [_row(system, tight, few["normal"]) for system in ABLATIONS],
        "batches": peak_batches(times),
    }


def _one_and_four(normal: list[list[float]], times: Times) -> list[dict[str, Any]]:
    """Return rows of the first backbone alone, with one function and with four."""
    one, rows = dataclasses.replace(times, models=times.models[:1]), []
    for count in FUNCTIONS:
        copies = dataclasses.replace(one, devices_per_model=min(count, times.devices_per_model))
        rows += [{"functions": count} | _row(s, copies, normal[:count]) for s in SYSTEMS]
    return rows


def _load(normal: list[list[float]], times: Times) -> list[dict[str, Any]]:
    rows = []
    for share in SHARES:
        calls = _thinned(normal, share)
        rows += [{"share": share} | _row(system, times, calls) for system in SYSTEMS]
    return rows


def _thinned(calls: list[list[float]], share: float) -> list[list[float]]:
    rng = random.Random(0)
    return [thinned(arrivals, share, rng) for arrivals in calls]


def _memory(normal: list[list[float]], times: Times) -> list[dict[str, Any]]:
    rows = []
    for gb in MEMORIES_GB:
        smaller = dataclasses.replace(times, device_gb=gb)
        rows += [{"device_gb": gb} | _row(system, smaller, normal) for system in SYSTEMS[:3]]
    return rows


def _keep_alive(normal: list[list[float]], times: Times) -> list[dict[str, Any]]:
    rows = []
    for seconds in KEEP_ALIVE_S:
        longer = dataclasses.replace(times, keep_alive_s=seconds)
        rows += [{"keep_alive_s": seconds} | _row(s, longer, normal) for s in SYSTEMS[:3]]
    return rows


def peak_batches(times: Times) -> list[dict[str, Any]]:
    """Return the largest batches, and rates of tokens, of two functions of the first model on one
    device, with one backbone and with two (Table 2): in the memory in which each private function
    has the paper's batch, and in the memory of `times`.

    Memory that weights and contexts leave is for KV pages. The functions take turns.
    """
    model, functions = times.models[0], 2
    own = times.context_gb + times.adapter_gb
    papers_gb = functions * (model.backbone_gb + own + PAPERS_BATCH * model.kv_gb)
    rows = []
    for device_gb in (papers_gb, times.device_gb):
        for name, copies in (("one backbone", 1), ("private weights", functions)):
            left = device_gb - copies * model.backbone_gb - functions * own
            batch = int(left / model.kv_gb / functions + 1e-6)  # of a function
            seconds = model.prefill.seconds(max(1, batch))
            seconds += (times.answer_tokens - 1) * model.decode_step_s
            rows.append(
                {
                    "device_gb": device_gb,
                    "system": name,
                    "peak_batch": batch,
                    "requests_per_s": batch / seconds,
                    "tokens_per_s": batch * times.answer_tokens / seconds,
                }
            )
    return rows


def _large(calls: list[list[float]], times: Times) -> list[dict[str, Any]]:
    four = dataclasses.replace(
        times, models=(LARGE,), device_gb=4 * times.device_gb, devices_per_model=1
    )
    return [_row(system, four, calls) for system in SYSTEMS]


def read_llm(file: Path, functions: int) -> list[list[float]]:
    """Return arrival times in seconds of the Azure LLM trace; request i is of function i mod n."""
    with gzip.open(file, "rt") as lines:
        stamps = [row["TIMESTAMP"][:26] for row in csv.DictReader(lines)]
    moments = [datetime.datetime.fromisoformat(stamp).timestamp() for stamp in stamps]
    rng = random.Random(0)
    # One of 64: the whole trace is of a service of many GPUs.
    kept = [moment - moments[0] for moment in moments if rng.random() < 1 / 64]
    return [kept[i::functions] for i in range(functions)]


def _row(system: System, times: Times, calls: list[list[float]]) -> dict[str, Any]:
    found = simulate(system, times, calls)
    return {"system": system.name} | {name: found[name] for name in _SHOWN}
