"""Searches tilings of kernels on this device: `python -m lora_jax.ops.tuning --out DIR`.

Adaptive tiling (ATMM; V-LoRA, section 4.3 and appendix B): for every shape the candidates that the
device can hold are timed, and the fastest is written down. Processes of their own compile ahead of
the device, and keep what they compiled. A search that was interrupted goes on where it stopped.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from lora_jax.ops import dispatch
from lora_jax.ops.tuning_programs import OPS, Compilers, Programs, Shape, Tunable, find_tunable
from lora_jax.ops.tuning_table import TABLES, device_folder

HOPELESS = 2.0  # times the best so far: not worth more than one sample
SAMPLES = 5
NUMBERS = 1 << 22
CALLS = 4  # of a program, enqueued before the host waits


def search(
    tunable: Tunable, done: list[dict], compilers: Compilers, *, progress: bool = True
) -> Iterable[dict]:
    """Yield an entry for each shape that is not in `done`: its fastest tiling, and all times.

    Raises:
        RuntimeError: no candidate of a shape runs.
    """
    known = [entry["shape"] for entry in done]
    left = [dict(shape) for shape in tunable.shapes if dict(shape) not in known]
    configs = [list(tunable.candidates(shape)) for shape in left]
    jobs = [
        [compilers.compile(tunable.op, shape, config) for config in some]
        for shape, some in zip(left, configs, strict=True)
    ]
    with tqdm(
        total=sum(map(len, configs)), desc=tunable.op, unit="tiling", disable=not progress
    ) as bar:
        for shape, some, futures in zip(left, configs, jobs, strict=True):
            times = list(_measured(tunable, shape, some, futures, bar))
            if not times:
                raise RuntimeError(f"{tunable.op}: no configuration runs at {shape}")
            best = min(times, key=lambda t: t["us"])
            yield {"shape": shape, **best, "times": times}


def _measured(
    tunable: Tunable, shape: Shape, configs: list, futures: list[Future], bar: tqdm
) -> Iterator[dict]:
    """Yield the time of each configuration of a shape that runs."""
    arrays, best = random_arrays(tunable, shape), math.inf
    for config, future in zip(configs, futures, strict=True):
        took = _measure(config, future, arrays, tunable.launches(shape), best)
        bar.update()
        if took is not None:
            best = min(best, took)
            bar.set_postfix(best_us=f"{best:.1f}")
            yield {"config": dataclasses.asdict(config), "us": round(took, 2)}


def random_arrays(tunable: Tunable, shape: Shape) -> Any:
    """Return a program's arguments on the device: random numbers where no values are given."""

    def array(a):
        if isinstance(a, np.ndarray):
            return jnp.asarray(a)
        return jnp.resize(_random_numbers(a.dtype), a.shape)

    return jax.tree.map(array, tunable.arguments(shape))


@functools.cache
def _random_numbers(dtype: jnp.dtype) -> jax.Array:
    """Return many of them, made once: every shape compiles a generator of its own for longer."""
    return jax.random.normal(jax.random.key(0), (NUMBERS,), dtype)


def _measure(
    config: Any, compiled: Future, arrays: Any, launches: int, best_us: float
) -> float | None:
    """Return median microseconds of a launch, from one sample if hopeless; None: it fails."""
    try:
        program = compiled.result()
        jax.block_until_ready(program(*arrays))
    except Exception as error:  # a compiler refuses what no formula foresaw; the search goes on
        print(f"{config}: {(str(error) or repr(error)).splitlines()[0][:200]}", file=sys.stderr)
        return None
    samples = []
    while len(samples) < SAMPLES:
        start = time.perf_counter()
        for _ in range(CALLS):
            result = program(*arrays)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) * 1e6 / (CALLS * launches))
        if samples[0] > HOPELESS * best_us:
            break
    return statistics.median(samples)


def gain_over_fixed(entries: list[dict]) -> dict:
    """Return how much faster tuning is than the best single configuration for all shapes.

    `gain` is the geometric mean over shapes of its time over the tuned one, `worst` the largest
    ratio; only configurations that run at every shape count. 1.0 when no configuration does.
    """
    per_shape = [
        {json.dumps(t["config"], sort_keys=True): t["us"] for t in e["times"]} for e in entries
    ]
    common = set.intersection(*(set(times) for times in per_shape)) if per_shape else set()

    def ratios(config: str) -> list[float]:
        return [t[config] / e["us"] for t, e in zip(per_shape, entries, strict=True)]

    if not common:
        return {"config": None, "gain": 1.0, "worst": 1.0}
    best = min(common, key=lambda config: statistics.geometric_mean(ratios(config)))
    found = ratios(best)
    return {
        "config": json.loads(best),
        "gain": round(statistics.geometric_mean(found), 3),
        "worst": round(max(found), 3),
    }


def main() -> None:
    """Tune the ops that were asked for and write one table each."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.ops.tuning", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=tuple(OPS), default=list(OPS))
    parser.add_argument("--out", type=Path, help="folder of the tables; by default this package's")
    parser.add_argument("--programs", type=Path, help="folder of compiled programs; kept there")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    kind = jax.devices()[0].device_kind
    folder = args.programs or dispatch.cache_folder() / "tuning" / device_folder(kind)
    for op in args.op:
        table = (args.out or TABLES) / device_folder(kind) / f"{op}.json"
        with Programs(folder, args.processes) as compilers:
            entries = tune(find_tunable(op), table, kind, compilers)
        gain = gain_over_fixed(entries)
        print(f"{op}: {gain['gain']:.2f}x of the best single tiling, {gain['config']}; {table}")


def tune(
    tunable: Tunable, table: Path, kind: str, compilers: Compilers, *, progress: bool = True
) -> list[dict]:
    """Return all entries of the table, which is written after every shape."""
    entries = json.loads(table.read_text())["entries"] if table.exists() else []
    table.parent.mkdir(parents=True, exist_ok=True)
    for entry in search(tunable, entries, compilers, progress=progress):
        entries.append(entry)
        today = datetime.date.today().isoformat()
        head = {"device": kind, "jax": jax.__version__, "date": today}
        gain = {"over_best_single_tiling": gain_over_fixed(entries)}
        rows = ",\n".join(f"  {json.dumps(e)}" for e in entries)
        text = json.dumps({**head, **gain}, indent=1)[:-2] + f',\n "entries": [\n{rows}\n ]\n}}\n'
        part = table.with_suffix(".part")
        part.write_text(text)
        part.replace(table)
    return entries


if __name__ == "__main__":
    main()
