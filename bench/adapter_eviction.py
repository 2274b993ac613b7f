"""Hits and read times of the host tier on real traces: GDSF, as served, beside LRU.

`python -m bench.adapter_eviction --traces DIR --out DIR`: a simulation without a model. Evictions
are those of `lora_jax.adapters.host_memory` (`room`, `use_ledger`). One client of a trace is one
adapter.

- ServeGen (github.com/alibaba/ServeGen): clients of five production models, rate and CV by window
  of 10 minutes, one day. Arrivals are drawn from these; one engine gets an equal share of them all.
- Azure Functions 2021: the first 199 invocations of 31 functions, in their order.

Traces name no sizes: mixed ranks are 8 to 128 in equal numbers, dealt out at random.
"""

import argparse
import csv
import gzip
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench import record

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from lora_jax.adapters.host_memory.room import (
    HostCopy,
    HostShare,
    Policy,
    least_valuable,
    make_room,
)
from lora_jax.adapters.host_memory.use_ledger import UseLedger, read_seconds
from lora_jax.adapters.registry_errors import AdapterRejected

SERVEGEN, AZURE = "servegen_windows_1day.csv.gz", "azure_functions_2021_first.csv.gz"
WINDOW_S = 600
RANKS = (8, 16, 32, 64, 128)
RANK_BYTES = 2 * 2_621_440  # Llama-3.1-8B, every linear map, 16 bits
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the bytes of all adapters
COLORS = {"lru": "#9a9a9a", "gdsf": "#1f77b4"}


def least_recent(copies: Sequence[HostCopy], num_bytes: int, count: int) -> list[HostCopy] | None:
    """Return what LRU evicts to free both; None when that is not enough."""
    plain = [HostCopy(c.digest, c.num_bytes, c.last_use, fixed=c.fixed) for c in copies]
    return least_valuable(plain, num_bytes, count)


POLICIES: dict[str, Policy] = {"lru": least_recent, "gdsf": least_valuable}


def simulate(
    asked: Sequence[str], sizes: dict[str, int], budget: int, policy: Policy
) -> dict[str, float]:
    """Return the hit ratio, the milliseconds of reads for a request, and those of a miss.

    An adapter larger than `budget` is read each time and not kept.
    """
    ledger, there, hits, read_s = UseLedger(), set(), 0, 0.0
    for name in asked:
        if name in there:
            hits += 1
        else:
            read_s += read_seconds(sizes[name])
            copies = [
                HostCopy(one, sizes[one], ledger.last_use(one), ledger.value(one, sizes[one]))
                for one in sorted(there)
            ]
            try:
                gone = make_room(copies, sizes[name], HostShare(), budget, policy)
            except AdapterRejected:
                continue
            for one in gone:
                ledger.evicted(one, sizes[one])
            there = there - gone | {name}
        ledger.used(name)
    misses = len(asked) - hits
    return {
        "hit_ratio": hits / len(asked),
        "read_ms_per_request": 1000 * read_s / len(asked),
        "read_ms_per_miss": 1000 * read_s / max(misses, 1),
    }


def servegen(path: Path, requests: int) -> dict[str, list[str]]:
    """Return by model the clients of about so many requests, in the order of a day."""
    windows: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            results = windows.setdefault(row["model"], {}).setdefault(row["client"], [])
            results.append((float(row["t_s"]), float(row["rate_rps"]), float(row["iat_cv"])))
    asked = {}
    for model, clients in sorted(windows.items()):
        total = WINDOW_S * sum(rate for results in clients.values() for _, rate, _ in results)
        rng = np.random.default_rng(0)
        arrivals = [
            (time, client)
            for client, results in sorted(clients.items())
            for time in client_arrivals(sorted(results), requests / total, rng)
        ]
        asked[f"ServeGen {model}"] = [client for _, client in sorted(arrivals)]
    return asked


def client_arrivals(
    windows: Sequence[tuple[float, float, float]], share: float, rng: np.random.Generator
) -> list[float]:
    """Return the times at which a client of windows (start, rate, CV) asks this engine.

    Gamma intervals of the window's CV run on a clock that ticks once for each expected request.
    """
    starts, rates, spreads = map(np.asarray, zip(*windows, strict=True))
    ends = np.cumsum(rates * WINDOW_S * share)
    times, clock = [], 0.0
    while True:
        here = min(int(np.searchsorted(ends, clock, side="right")), len(ends) - 1)
        shape = 1 / max(spreads[here], 0.05) ** 2
        # The first is cut at random: the day begins between two requests.
        part = 1.0 if times else rng.random()
        clock += part * rng.gamma(shape, 1 / shape)
        if clock >= ends[-1]:
            return times
        here = int(np.searchsorted(ends, clock, side="right"))
        into = clock - (ends[here - 1] if here else 0.0)
        times.append(float(starts[here] + into / (rates[here] * share)))


def azure_2021(path: Path) -> dict[str, list[str]]:
    """Return the functions in the order in which their invocations began."""
    with gzip.open(path, "rt") as lines:
        rows = list(csv.DictReader(lines))
    begun = [(float(row["end_timestamp"]) - float(row["duration"]), row["func"]) for row in rows]
    return {"Azure Functions 2021": [name for _, name in sorted(begun)]}


def sizes_of(names: Sequence[str], seed: int | None) -> dict[str, int]:
    """Return the bytes of each adapter: mixed ranks by `seed`, all of rank 16 without one."""
    if seed is None:
        return dict.fromkeys(names, 16 * RANK_BYTES)
    ranks = list(itertools.islice(itertools.cycle(RANKS), len(names)))
    random.Random(seed).shuffle(ranks)
    return {name: rank * RANK_BYTES for name, rank in zip(names, ranks, strict=True)}


def measure(traces: dict[str, list[str]], seeds: int) -> list[dict[str, Any]]:
    """Return one row for each trace, kind of sizes, share and policy; means over the seeds."""
    rows = []
    for trace, asked in traces.items():
        names = sorted(set(asked))
        for kind, given in (("mixed", range(seeds)), ("equal", (None,))):
            dealt = [sizes_of(names, seed) for seed in given]
            for share, policy in itertools.product(SHARES, POLICIES):
                results = [
                    simulate(asked, sizes, int(share * sum(sizes.values())), POLICIES[policy])
                    for sizes in dealt
                ]
                means = {key: float(np.mean([one[key] for one in results])) for key in results[0]}
                row = {"trace": trace, "requests": len(asked), "adapters": len(names)}
                rows.append(row | {"sizes": kind, "share": share, "policy": policy} | means)
    return rows


def plot_adapter_eviction(result: dict[str, Any], path: Path) -> None:
    """Draw hits and read times by share of the bytes, one column for each trace."""
    rows = [row for row in result["rows"] if row["sizes"] == "mixed"]
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    titles = {"hit_ratio": "hit ratio", "read_ms_per_request": "reads, ms per request"}
    fig, axes = plt.subplots(
        2, len(traces), figsize=(2.3 * len(traces), 4.8), layout="constrained", squeeze=False
    )
    for (line, key), (column, trace) in itertools.product(enumerate(titles), enumerate(traces)):
        ax = axes[line, column]
        for policy, color in COLORS.items():
            own = [row for row in rows if (row["trace"], row["policy"]) == (trace, policy)]
            shares = [100 * row["share"] for row in own]
            label = {"lru": "LRU", "gdsf": "GDSF (as served)"}[policy]
            ax.plot(shares, [row[key] for row in own], "o-", ms=3, color=color, label=label)
        if line == 0:
            ax.set_title(f"{trace}\n{own[0]['adapters']} adapters", fontsize=8)
        else:
            ax.set_xlabel("host tier, % of all bytes", fontsize=8)
        ax.set_ylim(0, 1 if key == "hit_ratio" else None)
        ax.set_ylabel("" if column else titles[key], fontsize=8)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=7, frameon=False)
    fig.suptitle(
        f"Eviction from the host tier, ranks 8 to 128, simulated, {result['date']}", size=9
    )
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main() -> None:
    """Simulate, write the result and its plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_eviction", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--traces", type=Path, required=True, help=f"folder with {SERVEGEN}, {AZURE}"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--requests", type=int, default=30_000, help="requests of each ServeGen model"
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of draws of ranks; results are means"
    )
    given = parser.parse_args()
    for name in (SERVEGEN, AZURE):
        if not (given.traces / name).is_file():
            parser.exit(1, f"{given.traces} has no {name}.\n")
    if given.requests < 1 or given.seeds < 1:
        parser.exit(1, "--requests and --seeds must be at least 1.\n")
    traces = servegen(given.traces / SERVEGEN, given.requests)
    traces |= azure_2021(given.traces / AZURE)
    result = record.about() | {"rows": measure(traces, given.seeds)}
    record.write(given.out / "adapter_eviction.json", result)
    plot_adapter_eviction(result, given.out / "adapter_eviction.png")
    for row in result["rows"]:
        told = f"{row['hit_ratio']:.3f} {row['read_ms_per_request']:.1f} ms/request"
        told += f" {row['read_ms_per_miss']:.0f} ms/miss"
        print(row["trace"], row["sizes"], row["share"], row["policy"], told)


if __name__ == "__main__":
    main()
