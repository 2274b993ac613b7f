"""Searches tilings of kernels on this device: `python -m lora_jax.ops.tuning --out DIR`.

Adaptive tiling (ATMM; V-LoRA, section 4.3 and appendix B): for every shape the candidates that the
device can hold are timed, and the fastest is written down. Processes of their own compile first,
side by side, and keep what they compiled. A search that was interrupted goes on where it stopped.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from lora_jax.ops import dispatch
from lora_jax.ops.tuning_programs import OPS, Compilers, Programs, Shape, Tunable, find_tunable
from lora_jax.ops.tuning_table import TABLES, device_folder

SAMPLES = 6
HOPELESS, HOPELESS_SAMPLES = 2.0, 3  # times the best so far: not worth more than three samples
NUMBERS = 1 << 22
CALLS = 8  # of a program, enqueued before the host waits
READS, READ_ROWS = 5, 2048  # of a million numbers each: 4 GB, a millisecond of an H200


def search(
    tunable: Tunable, done: list[dict], compilers: Compilers, *, progress: bool = True
) -> Iterable[dict]:
    """Yield an entry for each shape that is not in `done`: its fastest tiling, and all times.

    Raises:
        RuntimeError: no candidate of a shape runs.
    """
    shapes = [entry["shape"] for entry in done]
    left = [dict(shape) for shape in tunable.shapes if dict(shape) not in shapes]
    configs = [list(tunable.candidates(shape)) for shape in left]
    jobs = [
        [compilers.compile(tunable.op, shape, config) for config in some]
        for shape, some in zip(left, configs, strict=True)
    ]
    # Not beside what is timed: other processes on the device made small launches twice as long.
    compilers.wait(progress=progress)
    with tqdm(
        total=sum(map(len, configs)), desc=tunable.op, unit="tiling", disable=not progress
    ) as bar:
        for shape, some, loads in zip(left, configs, jobs, strict=True):
            times = _measured(tunable, shape, some, loads, bar)
            if not times:
                raise RuntimeError(f"{tunable.op}: no configuration runs at {shape}")
            best = min(times, key=lambda t: t["us"])
            yield {"shape": shape, **best, "times": times}


def _measured(
    tunable: Tunable, shape: Shape, configs: list, loads: list[Callable], bar: tqdm
) -> list[dict]:
    """Return the time of each configuration of a shape that runs.

    They take turns, so that what else the host does for a while makes no one of them slow.
    """
    arrays, programs = random_arrays(tunable, shape), []
    for config, load in zip(configs, loads, strict=True):
        programs.append(_warm(config, load, arrays))
        bar.update()
    left = [i for i, program in enumerate(programs) if program is not None]
    best_s, alone = dict.fromkeys(left, math.inf), math.inf
    for turn in range(SAMPLES):
        alone = min(alone, _elapsed(lambda: None))
        for i in left:
            best_s[i] = min(best_s[i], _elapsed(functools.partial(programs[i], *arrays)))
        if turn + 1 == HOPELESS_SAMPLES:
            best = min(best_s.values(), default=math.inf) - alone
            left = [i for i in left if best_s[i] - alone <= HOPELESS * best]
    each = 1e6 / (CALLS * tunable.launches(shape))
    return [
        {"config": dataclasses.asdict(configs[i]), "us": round((s - alone) * each, 2)}
        for i, s in best_s.items()
    ]


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


def _warm(config: Any, load: Callable[[], Callable], arrays: Any) -> Callable | None:
    """Return a program that has run once; None: it fails."""
    try:
        program = load()
        jax.block_until_ready(program(*arrays))
    except Exception as error:  # a compiler refuses what no formula foresaw; the search goes on
        print(f"{config}: {(str(error) or repr(error)).splitlines()[0][:200]}", file=sys.stderr)
        return None
    return program


def _elapsed(call: Callable[[], Any]) -> float:
    """Return the seconds of some calls behind what occupies the device.

    The host enqueues them meanwhile, so that one which is slower than the device does not count.
    What else it does only ever makes this longer.
    """
    start, last = time.perf_counter(), None
    before = _occupy()
    for _ in range(CALLS):
        last = call()
    jax.block_until_ready((before, last))
    return time.perf_counter() - start


def _occupy() -> jax.Array:
    """Return what is ready when the device was busy for some milliseconds; it empties the L2."""
    return [_read(_much_to_read()) for _ in range(READS)][-1]


@functools.cache
def _much_to_read() -> jax.Array:
    return jnp.zeros((READ_ROWS, 1 << 20), jnp.bfloat16)


@jax.jit
def _read(much: jax.Array) -> jax.Array:
    return jnp.max(much)


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
    gains = ratios(best)
    return {
        "config": json.loads(best),
        "gain": round(statistics.geometric_mean(gains), 3),
        "worst": round(max(gains), 3),
    }


def main() -> None:
    """Tune the ops that were asked for and write one table each."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.ops.tuning", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=tuple(OPS), default=list(OPS))
    parser.add_argument("--out", type=Path, help="folder of the tables (default: this package's)")
    parser.add_argument("--programs", type=Path, help="folder where compiled programs are kept")
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
