"""The simulator's times as they are on this machine, and a slice of arrivals run both ways.

`bench.functions --measure` writes what `--simulate --times FILE` reads. The slice says how far the
simulated means are from those that were run.
"""

import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bench.functions.device import FunctionState
from bench.functions.simulator import Simulation
from bench.functions.systems import System
from bench.functions.times import Times, times_of
from lora_jax.models import model_class
from lora_jax.models.loader import read_config, wanted_dtype
from serving import Sampling
from serving.functions import Agent, Function
from serving.functions.policies.batching import fit
from serving.functions.processes import Zygote
from serving.functions.published import Published

_BATCHES = (1, 2, 4, 8)
_REPEATS = 5
_DECODED = 64
_PROMPT = "The court has held that the contract"
_ANSWER = 100
_SLO = 5  # times the first token of one request (ServerlessLoRA, 5.10)


def measure(model: Path, adapter: Path, sizes: dict[str, Any], slice_s: float) -> dict[str, Any]:
    """Return the times of this machine, and a slice of so many seconds run and simulated."""
    start = time.perf_counter()
    zygote = Zygote()
    zygote.expect_ready()
    libraries_s = time.perf_counter() - start
    zygote.close()
    start = time.perf_counter()
    pages = Published(str(model), None)
    load_s, gigabytes = time.perf_counter() - start, pages.num_bytes / 1e9
    pages.close()
    with Agent(model, max_lora_rank=16, **sizes) as agent:
        functions = [agent.function(adapter, name=f"f{i}") for i in range(2)]
        times = _times(model, adapter, functions[0], libraries_s, load_s, gigabytes, sizes)
        return {"times": times, "slice": compare(functions, times_of(times), slice_s)}


def _times(
    model: Path,
    adapter: Path,
    function: Function,
    libraries_s: float,
    load_s: float,
    gigabytes: float,
    sizes: dict[str, Any],
) -> dict[str, Any]:
    """Return fields of `times.Times`, the model's among them."""
    function.generate(_PROMPT, _sampling(_DECODED))
    alone_s, step_s = _streamed(function, _DECODED)
    first = {size: _seconds(function, size, 1) for size in _BATCHES}
    more_s = alone_s - first[1]  # a stream's messages, for every batch
    line = fit(list(first), [seconds + more_s for seconds in first.values()])
    starts = []
    for _ in range(_REPEATS):
        function.offload()
        function.warm()
        starts.append(function.start_times["start_s"])
    config = read_config(model)
    kv = model_class(config.model_type).kv_shape(config)
    per_token = kv.bytes_per_token(wanted_dtype(model, None))
    adapter_gb = sum(file.stat().st_size for file in adapter.iterdir()) / 1e9
    return {
        "models": [
            {
                "name": model.name,
                "backbone_gb": gigabytes,
                "prefill": {"base_s": line.base_s, "slope_s": line.slope_s},
                "slo_s": _SLO * line.base_s,
                "decode_step_s": step_s,
                "kv_gb": sizes["max_model_len"] * per_token / 1e9,
                "largest_batch": sizes["max_num_seqs"],
            }
        ],
        "answer_tokens": _ANSWER,
        "libraries_s": libraries_s,
        "context_s": statistics.median(starts),
        "context_gb": function.about["private_bytes"] / 1e9,
        "adapter_gb": adapter_gb,
        "storage_gb_per_s": gigabytes / load_s,
        "devices_per_model": 1,
    }


def compare(functions: list[Function], times: Times, seconds: float) -> dict[str, Any]:
    """Return means of the same arrivals run on these functions and simulated: two functions whose
    calls come at random, so that half of the machine's time is used."""
    model, rng = times.models[0], random.Random(0)
    busy_s = model.prefill.base_s + (_ANSWER - 1) * model.decode_step_s
    arrivals = [_poisson(rng, 0.25 / busy_s, seconds) for _ in functions]
    run = _run(functions, arrivals)
    states = [FunctionState(f"f{i}", model, moments) for i, moments in enumerate(arrivals)]
    simulation = Simulation(System("here", always_on=True), times, states)
    simulation.run(seconds)
    done = [request for state in states for request in state.done]
    simulated = {
        "mean_ttft_s": statistics.fmean(r.first - r.arrival for r in done),
        "mean_e2e_s": statistics.fmean(r.last - r.arrival for r in done),
    }
    ratios = {name: round(simulated[name] / run[name], 3) for name in run}
    return {"requests": len(done), "run": run, "simulated": simulated, "simulated_over_run": ratios}


def _run(functions: list[Function], arrivals: list[list[float]]) -> dict[str, float]:
    """Return means over calls that are made at their times."""
    first, whole, lock = [], [], threading.Lock()
    begin = time.perf_counter() + 0.1

    def call(function: Function, moment: float) -> None:
        time.sleep(max(0.0, begin + moment - time.perf_counter()))
        start, seen = begin + moment, 0.0
        for _ in function.stream(_PROMPT, _sampling(_ANSWER)):
            seen = seen or time.perf_counter() - start
        with lock:
            first.append(seen)
            whole.append(time.perf_counter() - start)

    calls = [(f, m) for f, moments in zip(functions, arrivals, strict=True) for m in moments]
    threads = [threading.Thread(target=call, args=one) for one in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"mean_ttft_s": statistics.fmean(first), "mean_e2e_s": statistics.fmean(whole)}


def _poisson(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """Return at least one moment within the seconds."""
    moments, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        moments.append(now)
    return moments or [seconds / 2]


def _streamed(function: Function, tokens: int) -> tuple[float, float]:
    """Return median seconds to a stream's first piece, and of each token behind it."""
    firsts, steps = [], []
    for _ in range(_REPEATS):
        start, first = time.perf_counter(), 0.0
        for _ in function.stream(_PROMPT, _sampling(tokens + 1)):
            first = first or time.perf_counter() - start
        firsts.append(first)
        steps.append((time.perf_counter() - start - first) / tokens)
    return statistics.median(firsts), statistics.median(steps)


def _seconds(function: Function, prompts: int, tokens: int) -> float:
    """Return the median seconds of so many prompts at once, each with so many tokens."""
    found = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        function.generate([_PROMPT] * prompts, _sampling(tokens))
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _sampling(tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
