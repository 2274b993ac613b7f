"""Measure every kernel, print the table, and write it with its plot."""

import argparse
import datetime
import importlib
import json
import statistics
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from bench.kernel_plots import plot_kernels
from bench.kernels.timing import copy_bandwidth, dense_rate
from cuda_backend import ffi

PARTS = ("lora", "moe", "grouped", "merge", "attention", "sorting", "grid")


def show(row: dict) -> str:
    """Return one line of the table."""
    peer, bar = (f"{row[k]:7.1f}" if row.get(k) else "      -" for k in ("peer_us", "bar_us"))
    said = "" if row["met"] is None else ("met" if row["met"] else "missed")
    return (
        f"{row['name']:72} {row['us']:7.1f} us  floor {row['floor_us']:6.1f}  peer {peer}  "
        f"bar {bar} {said:6}  error {row['error']:.1e}"
    )


def measure(part: str, bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield a part's rows; one that fails is said and ends it, so that other parts still count."""
    try:
        for row in importlib.import_module(f"bench.kernels.{part}").rows(bandwidth, dense):
            bar = row.get("bar_us")
            row["met"] = bar and row["us"] <= bar
            print(show(row), flush=True)
            yield row
    except Exception:
        print(f"{part} failed:\n{traceback.format_exc()}", flush=True)


def summary(rows: list[dict]) -> dict | None:
    """Return how the grid's points compare with the best peer of each, if it was measured."""
    ratios = {r["name"]: r["peer_us"] / r["us"] for r in rows if r.get("grid") and r["peer_us"]}
    if not ratios:
        return None
    worst = min(ratios, key=lambda name: ratios[name])
    return {
        "points": len(ratios),
        "geometric_mean": statistics.geometric_mean(ratios.values()),
        "slower_than_peer": sum(ratio < 1 for ratio in ratios.values()),
        "worst": {"name": worst, "ratio": ratios[worst]},
    }


def main() -> None:
    """Run the parts that were asked for, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and plot")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    ffi.require()
    device, today = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    bandwidth, dense = copy_bandwidth(), dense_rate()
    print(f"{device}, {today}, copy {bandwidth / 1e12:.2f} TB/s, dense {dense / 1e12:.0f} TFLOP/s")
    result: dict[str, Any] = {
        "device": device,
        "date": today,
        "jax": jax.__version__,
        "copy_tb_per_s": bandwidth / 1e12,
        "dense_tflop_per_s": dense / 1e12,
        "rows": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"kernels_{device.lower().replace(' ', '_')}_{today}.json"
    for part in args.only:
        for row in measure(part, bandwidth, dense):
            result["rows"].append(row)
            # After every row: whoever cuts the run short keeps what it has measured.
            file.write_text(json.dumps(result, indent=1) + "\n")
    result["grid"] = summary(result["rows"])
    print(f"grid, peer's time over ours: {result['grid']}")
    file.write_text(json.dumps(result, indent=1) + "\n")
    plot_kernels(result, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
