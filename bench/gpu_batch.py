"""All benchmarks that need GPUs, in one run with a time limit.

`python -m bench.gpu_batch --out DIR --budget-s 1500` runs the parts of `bench.gpu_parts` one after
the other. A part that outlasts its limit or the budget is ended with its processes, and the next
one runs. DIR/NAME.log has what a part printed, DIR/NAME its JSON files and plots. After each part
DIR/batch.json and DIR/batch.tar.gz, the latter with all of DIR, are written again, so that a run
which is cut short leaves what it has measured. Parts that need more GPUs than the machine has
(`CUDA_VISIBLE_DEVICES` counts) are left out and listed.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.gpu_parts import PARTS, Part
from bench.gpus import count_gpus

# A part is not begun with less time than this: its programs would not be compiled by then.
_LEAST_SECONDS = 20
_PACKED = "batch.tar.gz"


def run_part(part: Part, out: Path, seconds: float) -> dict[str, object]:
    """Run one part for at most so many seconds.

    Returns its exit status (None: ended at its limit) and the seconds that it took.
    """
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *(word.format(out=folder) for word in shlex.split(part.command))]
    began, process = time.monotonic(), None
    with (out / f"{part.name}.log").open("wb") as log:
        try:
            with _held_signals():
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process is not None:
                _end_group(process)
    return {"status": status, "seconds": round(time.monotonic() - began, 1)}


@contextlib.contextmanager
def _held_signals() -> Iterator[None]:
    """Let signals that end the batch come at the end: a part that has begun must be known then."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _end_group(process: subprocess.Popen) -> None:
    """Kill what is left of a part: servers and workers that it started are in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pack(out: Path) -> None:
    """Write all files of a batch into its archive."""
    with tarfile.open(out / f"{_PACKED}.part", "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if not path.name.startswith(_PACKED):
                archive.add(path, path.name)
    (out / f"{_PACKED}.part").replace(out / _PACKED)


def run_batch(parts: Sequence[Part], out: Path, budget_s: float, num_gpus: int) -> list[dict]:
    """Run the parts that the machine and the budget allow, and return a row for each."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + budget_s
    rows = []
    for part in parts:
        left = end - time.monotonic()
        if part.devices > num_gpus:
            row = {"left_out": f"needs {part.devices} GPUs, there are {num_gpus}"}
        elif left < _LEAST_SECONDS:
            row = {"left_out": f"{max(left, 0):.0f} s of the budget are left"}
        else:
            row = run_part(part, out, min(part.seconds, left))
        rows.append({"part": part.name, "command": part.command, **row})
        (out / "batch.json").write_text(json.dumps(rows, indent=1) + "\n")
        pack(out)
        print(describe(rows[-1]), flush=True)
    return rows


def describe(row: dict) -> str:
    """Return the line of a part's row."""
    if "left_out" in row:
        return f"{row['part']:<14} left out: {row['left_out']}"
    ends = {None: "ended at its limit", 0: "done"}
    end = ends.get(row["status"], f"failed with exit status {row['status']}, see its log")
    return f"{row['part']:<14} {row['seconds']:>7} s  {end}"


def chosen(names: Sequence[str] | None) -> list[Part]:
    """Return the parts with these names in this order; None: all parts.

    Raises:
        ValueError: for an unknown name.
    """
    if names is None:
        return list(PARTS)
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise ValueError(f"--parts: no part is named {name!r}; parts are {', '.join(known)}")
    return [known[name] for name in names]


def main(argv: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="folder for logs and results; not with --list")
    parser.add_argument(
        "--budget-s", type=float, default=7200, help="seconds for the whole batch (default: 7200)"
    )
    parser.add_argument(
        "--parts", nargs="+", metavar="NAME", help="parts to run, in this order (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the parts and run none")
    arguments = parser.parse_args(argv)
    try:
        parts = chosen(arguments.parts)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        for part in parts:
            print(f"{part.name:<14} {part.devices} GPU, {part.seconds:>4} s: {part.command}")
        return
    if arguments.out is None:
        parser.error("--out: a folder for logs and results is needed, except with --list")
    # A part is in a process group of its own: the signal that ends the batch does not reach it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = run_batch(parts, arguments.out, arguments.budget_s, count_gpus(os.environ))
    if any(row.get("status", 0) != 0 for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
