"""Measure every kernel, print the table, and write it with its plots.

A run that was cut short, or of which a point failed, goes on where the file of its folder ends: of
the same day, on the same kind of device.
"""

import argparse
import collections
import importlib
import importlib.util
import json
import os
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import record
from bench.kernels.jobs import Job, Machine
from bench.kernels.summary import say_grid, summarise, table
from bench.kernels.timing import copy_bandwidth, dense_rate
from cuda_backend import ffi

PARTS = (
    *("lora", "moe", "grouped", "merge", "attention", "eight_bits", "few", "sorting", "grid"),
    "popularities",
)


def show(row: dict) -> str:
    """Return one line of the table."""
    peer, bar = (f"{row[k]:7.1f}" if row.get(k) else "      -" for k in ("peer_us", "bar_us"))
    text = "" if row["met"] is None else ("met" if row["met"] else "missed")
    return (
        f"{row['name']:72} {row['us']:7.1f} us  limit {row['floor_us']:6.1f}  peer {peer}  "
        f"target {bar} {text:6}  error {row['error']:.1e}"
    )


class Results:
    """The file of a run, written after every row."""

    def __init__(self, file: Path, head: dict[str, Any]):
        self.file = file
        self.content = json.loads(file.read_text()) if file.exists() else {**head, "rows": []}

    def names(self, part: str) -> set[str]:
        """Return what has been measured of a part."""
        return {row["name"] for row in self.content["rows"] if row["part"] == part}

    def add(self, row: dict) -> None:
        """Keep and print a row."""
        bar = row.get("bar_us")
        row["met"] = bar and row["us"] <= bar
        print(show(row), flush=True)
        self.content["rows"].append(row)
        self.write()

    def write(self) -> None:
        """Write the file."""
        record.write(self.file, self.content)


def measure(jobs: list[Job]) -> Iterator[dict]:
    """Yield the jobs' rows; of one that fails, say so and go on."""
    for program in (program for job in jobs for program in job.programs):
        program.exception()  # compiled, or not: nothing runs beside what is timed
    left = collections.deque(jobs)
    jobs.clear()
    while left:
        job = left.popleft()  # and with the last of them go the arrays that they share
        try:
            yield job.measure()
        except Exception:
            print(f"{job.name} failed:\n{traceback.format_exc()}", flush=True)


def run(part: str, results: Results, machine: Machine) -> None:
    """Measure what is missing of a part."""
    start = time.perf_counter()
    module, known = importlib.import_module(f"bench.kernels.{part}"), results.names(part)
    left = [point for point in module.points() if point.name not in known]
    jobs = module.jobs(left, machine)
    traced = time.perf_counter() - start
    for row in measure(jobs):
        results.add({**row, "part": part})
    took = time.perf_counter() - start
    print(f"{part}: {len(left)} points, traced in {traced:.0f} s, all in {took:.0f} s", flush=True)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the table, and the plots if this machine can: the file is enough for another one."""
    path.with_suffix(".md").write_text(table(result))
    if importlib.util.find_spec("matplotlib"):
        importlib.import_module("bench.kernel_plots").plot_kernels(result, path)
    else:
        print(f"no matplotlib here: python -m bench.report {path.parent} draws the plots elsewhere")


def main() -> None:
    """Run the parts that were asked for, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and plots")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    start = time.perf_counter()
    record.need_gpu("tests/kernels runs the kernels in interpreters and emulators.")
    ffi.require()
    head = record.about(device := record.jax_device())
    file = args.out / f"kernels_{record.in_file_name(device)}_{head['date']}.json"
    results = Results(file, head)
    content = results.content
    if not content["rows"]:
        content["copy_tb_per_s"] = copy_bandwidth() / 1e12
        content["dense_tflop_per_s"] = dense_rate() / 1e12
    copied, dense = content["copy_tb_per_s"], content["dense_tflop_per_s"]
    print(
        f"{device}, {head['date']}, copy {copied:.2f} TB/s, dense {dense:.0f} TFLOP/s", flush=True
    )
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for part in args.only:
            run(part, results, Machine(copied * 1e12, dense * 1e12, threads))
    content["grid"] = summarise(content["rows"])
    results.write()
    print(say_grid(content["rows"]))
    draw(content, file.with_suffix(".png"))
    print(f"{len(content['rows'])} rows, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
