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
from bench.functions.systems import SYSTEMS, System
from bench.functions.times import Model, Times
from bench.functions.traces import CONVERSATIONS, read_classes, thinned
from serving.functions.policies.batching import PrefillTime, largest_batch

SHARES = (0.125, 0.25, 0.5, 1.0)  # of the calls: figure 11
MEMORIES_GB = (28.0, 32.0, 40.0, 48.0)  # of a device: figure 14
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
        "batches": peak_batches(times),
        "large": _large(read_llm(traces / CONVERSATIONS, 4), times),
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
        rng = random.Random(0)
        calls = [thinned(arrivals, share, rng) for arrivals in normal]
        rows += [{"share": share} | _row(system, times, calls) for system in SYSTEMS]
    return rows


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
    """Return the largest batch, and its rate of tokens, of four functions of the first model on one
    device: with one backbone, and with as many private ones as fit (Table 2).

    Memory that weights and contexts leave is for KV pages; a batch's first tokens come within the
    SLO. Private weights are of one function alone, others wait for the device.
    """
    model, rows = times.models[0], []
    own = times.context_gb + times.adapter_gb
    for name, copies, functions in (("one backbone", 1, 4), ("private weights", 2, 2)):
        left = times.device_gb - copies * model.backbone_gb - functions * own
        room = max(0, int(left / model.kv_gb))
        in_slo = functions * largest_batch(model.prefill, model.slo_s, room)
        batch = min(room, in_slo)
        seconds = functions * (
            model.prefill.seconds(max(1, batch // functions))
            + (times.answer_tokens - 1) * model.decode_step_s
        )
        rows.append(
            {
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
