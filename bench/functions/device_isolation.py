"""Isolation "server" beside "none" on two GPUs, or on a CPU: tokens a second of the same tenants.

Random weights of a large shape. Both agents start at once, and rounds alternate. This process has
no device. Each part has a limit in time: what was found before is in the result.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from bench.functions.large_model import SHAPES, write_adapters, write_large
from serving import Sampling
from serving.functions import Agent, Function

LEVELS = "none", "server"
MAPS = {"q k v o": ("q_proj", "k_proj", "v_proj", "o_proj"), "all": ()}
_ROWS = 8  # requests of each tenant at once
_RANK = 16
_CHECKED = 24  # tokens of the answers that are compared
_WARM_S = 1.0  # of a round whose rate counts for nothing


@dataclasses.dataclass(frozen=True)
class Load:
    """Sizes of what is measured."""

    layers: int
    tenants: int
    prompt_tokens: int
    answer_tokens: int
    rounds: int
    seconds: float
    limit_s: float


class _Clock:
    """Time that is left of a limit, and seconds that each part took."""

    def __init__(self, limit_s: float):
        self._end, self.parts = time.monotonic() + limit_s, {}

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def run(self, name: str, part: Callable[[], Any], limit_s: float | None = None) -> Any:
        """Return what a part returns; TimeoutError where it takes longer than there is time."""
        start, done = time.monotonic(), Future()

        def run() -> None:
            try:
                done.set_result(part())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, name=name, daemon=True).start()
        limit_s = self.left_s if limit_s is None else min(limit_s, self.left_s)
        try:
            return done.result(limit_s)
        except TimeoutError:
            raise TimeoutError(f"{name} took longer than {limit_s:.0f} s") from None
        finally:
            self.parts[name] = round(time.monotonic() - start, 1)


def measure(shape: str, load: Load, told: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return rates of both levels for each set of maps; `error` says why a part is not there.

    Each part is printed as it is known, or given to `told`.
    """
    told = told or functools.partial(print, flush=True)
    clock, place = _Clock(load.limit_s), "/dev/shm" if os.path.isdir("/dev/shm") else None
    found: dict[str, Any] = {"shape": shape, **dataclasses.asdict(load), "rank": _RANK}
    scratch = tempfile.mkdtemp(dir=place)
    try:
        _measure(shape, load, clock, Path(scratch), found, told)
    except Exception as error:  # what was found is kept
        found["error"] = f"{type(error).__name__}: {error}"
        told(found["error"])
    finally:
        found["seconds_of_parts"] = clock.parts
        shutil.rmtree(scratch, ignore_errors=True)
    return found


def _measure(
    shape: str,
    load: Load,
    clock: _Clock,
    scratch: Path,
    found: dict[str, Any],
    told: Callable[[str], Any],
) -> None:
    few = dataclasses.replace(SHAPES[shape], num_layers=load.layers or SHAPES[shape].num_layers)
    found["layers"] = few.num_layers
    model = scratch / "model"
    clock.run("write the model", lambda: write_large(model, few))
    folders = {
        maps: write_adapters(scratch / f"adapters-{number}", few, load.tenants, only)
        for number, (maps, only) in enumerate(MAPS.items())
    }
    starts: dict[str, Any] = {}
    agents: dict[str, Agent] = {}

    def start(level: str) -> None:
        begun = time.monotonic()
        agents[level] = Agent(model, isolation=level, **_fields(level, load))
        agents[level].function()
        starts[level] = round(time.monotonic() - begun, 1)
        for maps, some in folders.items():
            for folder in some:
                agents[level].function(folder, name=_name(maps, folder))
        starts[f"{level}, with adapters"] = round(time.monotonic() - begun, 1)
        told(json.dumps({"started": starts}))

    def start_all() -> None:
        threads = [Future() for _ in LEVELS]

        def run(level: str, done: Future) -> None:
            try:
                done.set_result(start(level))
            except BaseException as error:
                done.set_exception(error)

        for level, done in zip(LEVELS, threads, strict=True):
            threading.Thread(target=run, args=(level, done), daemon=True).start()
        for done in threads:
            done.result()

    try:
        clock.run("start both levels", start_all)
        found["start_s"] = starts
        answers = lambda: _same_answers(agents, folders)  # noqa: E731
        found["same_answers"] = clock.run("compare answers", answers, 60.0)
        told(json.dumps({"same_answers": found["same_answers"]}))
        found["rows"] = []
        for number, maps in enumerate(folders):
            names = [_name(maps, folder) for folder in folders[maps]]
            left = len(folders) - number
            rows = clock.run(
                f"rounds of {maps}", lambda n=names, k=left: _rounds(agents, n, load, clock, k)
            )
            found["rows"] += [{"maps": maps, **row} for row in rows]
            told(json.dumps(found["rows"][-len(LEVELS) :]))
    finally:
        for agent in agents.values():
            with contextlib.suppress(TimeoutError):
                clock.run("end", agent.close, 15.0)


def _fields(level: str, load: Load) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_num_seqs": _ROWS * load.tenants,
        "max_model_len": max(128, load.prompt_tokens + load.answer_tokens + 16),
        "max_num_batched_tokens": max(256, _ROWS * load.tenants),
        "max_lora_rank": _RANK,
        "kv_cache_memory_bytes": 4 << 30,
        "enable_prefix_caching": False,
        "max_tenants": len(MAPS) * load.tenants,
    }
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        fields["kv_cache_memory_bytes"] = 64 << 20
        if level == "server":
            fields["tenant_processes"] = "one"
    return fields


def _name(maps: str, folder: Path) -> str:
    return f"{maps.replace(' ', '')}-{folder.name}"


def _same_answers(agents: dict[str, Agent], folders: dict[str, list[Path]]) -> dict[str, int]:
    """Return how many answers of both levels have the same tokens, and the same bits."""
    sampling = Sampling(temperature=0, max_tokens=_CHECKED, ignore_eos=True, logprobs=1)
    counts = {"answers": 0, "same_tokens": 0, "same_logprobs": 0, "other_than_base": 0}
    prompt = list(range(5, 45))
    base = agents["none"].function().generate([prompt], sampling)[0].outputs[0]
    for maps, some in folders.items():
        for folder in some[:4]:
            name = _name(maps, folder)
            one, other = (
                agent.functions[name].generate([prompt], sampling)[0].outputs[0]
                for agent in (agents["none"], agents["server"])
            )
            counts["answers"] += 1
            counts["same_tokens"] += one.token_ids == other.token_ids
            counts["same_logprobs"] += one.logprobs == other.logprobs
            counts["other_than_base"] += one.logprobs != base.logprobs
    return counts


def _rounds(
    agents: dict[str, Agent], names: list[str], load: Load, clock: _Clock, left: int
) -> list[dict[str, Any]]:
    """Return a row per level; rounds end early where time runs out, `left` such calls to come."""
    prompts = _Prompts(load.prompt_tokens)
    rates: dict[str, list[float]] = {level: [] for level in LEVELS}
    functions = {level: [agents[level].functions[n] for n in names] for level in LEVELS}
    for level in LEVELS:
        _round(functions[level], prompts, load, _WARM_S)
    longest, end = 0.0, time.monotonic() + clock.left_s * 0.9 / left
    for _ in range(load.rounds):
        start = time.monotonic()
        if start + longest > end:
            break
        for level in LEVELS:
            rates[level].append(_round(functions[level], prompts, load, load.seconds))
        longest = max(longest, time.monotonic() - start)
    shares = [b / a for a, b in zip(rates["none"], rates["server"], strict=True)]
    rows = []
    for level in LEVELS:
        row: dict[str, Any] = {"isolation": level, "rounds": len(rates[level])}
        if rates[level]:
            row["tokens_per_s"] = round(statistics.median(rates[level]))
            row["each"] = [round(rate) for rate in rates[level]]
            row["share_of_none"] = 1.0 if level == "none" else round(statistics.median(shares), 3)
        rows.append(row)
    return rows


class _Prompts:
    """Prompts of token ids, no two of which begin in the same way."""

    def __init__(self, length: int):
        self._length, self._numbers = length, itertools.count()

    def next(self, count: int) -> list[list[int]]:
        rng = np.random.default_rng(next(self._numbers))
        return rng.integers(5, 400, (count, self._length)).tolist()


def _round(functions: list[Function], prompts: _Prompts, load: Load, seconds: float) -> float:
    """Return output tokens a second of all tenants, each with `_ROWS` requests at once."""
    sampling = Sampling(temperature=0, max_tokens=load.answer_tokens, ignore_eos=True)
    end, made, lock = time.perf_counter() + seconds, [0], threading.Lock()

    def call(function: Function) -> None:
        while time.perf_counter() < end:
            outputs = function.generate(prompts.next(_ROWS), sampling)
            with lock:
                made[0] += sum(len(o.outputs[0].token_ids) for o in outputs)

    start = time.perf_counter()
    threads = [threading.Thread(target=call, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0] / (time.perf_counter() - start)
