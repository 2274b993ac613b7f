"""Searches tile configurations of a kernel on this device: `python -m lora_jax.ops.tuning`.

Adaptive tiling (ATMM; V-LoRA, section 4.3 and appendix B): for every shape the candidates that the
device can hold are timed, and the fastest is written down. A search that was interrupted goes on
where it stopped.
"""

import argparse
import dataclasses
import datetime
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from lora_jax.ops.tuning_table import TABLES, device_folder

OPS = ("grouped_matmul",)  # each has a module `tuning` with a function `tunable`
HOPELESS = 2.0  # times the best so far: not worth more than one sample
SAMPLES = 5
COMPILERS = 4  # at work at the same time

Shape = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Tunable:
    """One kernel as the search sees it.

    `prepare(shape)` makes the arrays of a shape and returns run(config), which compiles the kernel
    and returns a function that runs it `calls` times and waits. `candidates` leaves out what the
    device cannot hold; the first one is what is used without a table.
    """

    op: str
    shapes: tuple[Shape, ...]
    candidates: Callable[[Shape], Iterable[Any]]
    prepare: Callable[[Shape], Callable[[Any], Callable[[], None]]]
    calls: int


def search(tunable: Tunable, done: list[dict], *, progress: bool = True) -> Iterable[dict]:
    """Yield an entry for each shape that is not in `done`: its fastest tiling, and all times.

    Raises:
        RuntimeError: no candidate of a shape runs.
    """
    known = [entry["shape"] for entry in done]
    left = [shape for shape in tunable.shapes if dict(shape) not in known]
    total = sum(len(list(tunable.candidates(shape))) for shape in left)
    with tqdm(total=total, desc=tunable.op, unit="tiling", disable=not progress) as bar:
        for shape in left:
            times: list[dict] = []
            for config, program in _compiled(tunable, shape):
                took = _measure(config, program, tunable.calls, min_us(times))
                if took is not None:
                    times.append({"config": dataclasses.asdict(config), "us": took})
                bar.update()
                bar.set_postfix(best_us=f"{min_us(times):.1f}")
            if not times:
                raise RuntimeError(f"{tunable.op}: no configuration runs at {dict(shape)}")
            best = min(times, key=lambda t: t["us"])
            yield {"shape": dict(shape), **best, "times": times}


def _compiled(tunable: Tunable, shape: Shape) -> Iterable[tuple[Any, Future]]:
    """Yield each candidate with the future of its program; compilers work ahead of the device."""
    run = tunable.prepare(shape)
    with ThreadPoolExecutor(COMPILERS) as pool:
        configs = list(tunable.candidates(shape))
        yield from zip(configs, [pool.submit(run, config) for config in configs], strict=True)


def min_us(times: list[dict]) -> float:
    """Return the best time so far; infinity when there is none."""
    return min((t["us"] for t in times), default=math.inf)


def _measure(config: Any, compiled: Future, calls: int, best_us: float) -> float | None:
    """Return median microseconds of a call, from one sample if it is hopeless; None: it fails."""
    try:
        program = compiled.result()
        program()
    except Exception as error:  # a compiler refuses what no formula foresaw; the search goes on
        print(f"{config}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
        return None
    samples = []
    while len(samples) < SAMPLES:
        start = time.perf_counter()
        program()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
        if samples[0] > HOPELESS * best_us:
            break
    return statistics.median(samples)


def gain_over_fixed(entries: list[dict]) -> float:
    """Return how much faster tuning is than the best single configuration for all shapes.

    The geometric mean over shapes of its time over the tuned one; only configurations that run at
    every shape count. 1.0 when no configuration does.
    """
    per_shape = [
        {json.dumps(t["config"], sort_keys=True): t["us"] for t in e["times"]} for e in entries
    ]
    common = set.intersection(*(set(times) for times in per_shape)) if per_shape else set()

    def slowdown(config: str) -> float:
        ratios = [t[config] / e["us"] for t, e in zip(per_shape, entries, strict=True)]
        return statistics.geometric_mean(ratios)

    return min((slowdown(config) for config in common), default=1.0)


def main() -> None:
    """Tune the ops that were asked for and write one table each."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.ops.tuning", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--out", type=Path, help="folder of the tables; by default this package's")
    args = parser.parse_args()
    kind = jax.devices()[0].device_kind
    for op in args.op:
        tunable = importlib.import_module(f"lora_jax.ops.{op}.tuning").tunable()
        table = (args.out or TABLES) / device_folder(kind) / f"{op}.json"
        entries = tune(tunable, table, kind)
        print(f"{op}: {gain_over_fixed(entries):.2f}x of the best single tiling; {table}")


def tune(tunable: Tunable, table: Path, kind: str, *, progress: bool = True) -> list[dict]:
    """Return all entries of the table, which is written after every shape."""
    entries = json.loads(table.read_text())["entries"] if table.exists() else []
    table.parent.mkdir(parents=True, exist_ok=True)
    for entry in search(tunable, entries, progress=progress):
        entries.append(entry)
        today = datetime.date.today().isoformat()
        head = {"device": kind, "jax": jax.__version__, "date": today}
        part = table.with_suffix(".part")
        part.write_text(json.dumps({**head, "entries": entries}, indent=1) + "\n")
        part.replace(table)
    return entries


if __name__ == "__main__":
    main()
