"""Functions on this machine: seconds of a start, and the rate that turns leave of a lone one's."""

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bench.functions import calibration
from serving import Sampling
from serving.functions import Agent, Function

_SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 64}
_PROMPTS = ["The court"] * 8
_LONG = Sampling(temperature=0, max_tokens=128, ignore_eos=True)
_SLO_S = 1.0
_STARTS = 5


def measure(
    model: Path, adapter: Path, counts: list[int], seconds: float, slice_s: float
) -> dict[str, Any]:
    """Return times of starts, a row per number of functions that work at once, the simulator's
    times as they are here, and a slice of arrivals run and simulated."""
    with Agent(model, max_lora_rank=16, **_SIZES) as agent:
        starts = _starts(agent.function(adapter, name="start"))
    rows = [
        {"functions": count, "turns": turns, **_rates(model, adapter, count, seconds, turns)}
        for count in counts
        for turns in (True, False)
    ]
    calibrated = calibration.measure(model, adapter, _SIZES, slice_s)
    return {"starts": starts, "rates": rows, **calibrated}


def _starts(function: Function) -> dict[str, float]:
    """Return medians: of a start from the zygote, of its first answer, and of a later one."""
    one = Sampling(temperature=0, max_tokens=1)
    function.generate("The court", one)  # its programs are kept from now on
    whole, ready, warm = [], [], []
    for _ in range(_STARTS):
        function.offload()
        start = time.perf_counter()
        function.generate("The court", one)
        whole.append(time.perf_counter() - start)
        ready.append(function.start_times["start_s"])
        start = time.perf_counter()
        function.generate("The court", one)
        warm.append(time.perf_counter() - start)
    found = {"first_answer_s": whole, "ready_s": ready, "warm_answer_s": warm}
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


def _rates(
    model: Path, adapter: Path, count: int, seconds: float, turns: bool
) -> dict[str, float | list[float]]:
    """Return tokens a second of a lone function and of all at once, in alternating rounds."""
    slo_s = _SLO_S if turns else None
    with Agent(model, ttft_slo_s=slo_s, max_lora_rank=16, **_SIZES) as agent:
        functions = [agent.function(adapter, name=f"f{i}") for i in range(count)]
        lone, together = [], []
        for function in functions:
            function.generate(_PROMPTS, Sampling(max_tokens=8))
        for round_ in range(4):
            lone.append(token_rate([functions[round_ % count]], _PROMPTS, _LONG, seconds))
            together.append(token_rate(functions, _PROMPTS, _LONG, seconds))
    return {
        "lone_tokens_per_s": round(statistics.median(lone)),
        "together_tokens_per_s": round(statistics.median(together)),
        "share": round(statistics.median(together) / statistics.median(lone), 3),
    }


def token_rate(
    functions: list[Function], prompts: list[Any], sampling: Sampling, seconds: float
) -> float:
    """Return tokens a second of all functions; each has two callers, so that it always has work."""
    end, made, lock = time.perf_counter() + seconds, [0], threading.Lock()

    def call(function: Function) -> None:
        while time.perf_counter() < end:
            outputs = function.generate(prompts, sampling)
            with lock:
                made[0] += sum(len(o.outputs[0].token_ids) for o in outputs)

    start = time.perf_counter()
    threads = [threading.Thread(target=call, args=(f,)) for f in functions for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0] / (time.perf_counter() - start)
