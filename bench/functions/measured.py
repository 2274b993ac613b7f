"""Functions on this machine: seconds of a start, and the rate that turns leave of a lone one's."""

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.functions import calibration, hand_overs
from serving import Sampling
from serving.functions import Agent, Function

_SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 64}
_PROMPTS = ["The court"] * 8
_LONG = Sampling(temperature=0, max_tokens=128, ignore_eos=True)
_SLO_S = 1.0
_STARTS, _ROUNDS = 5, 6
_STREAM = Sampling(temperature=0, max_tokens=64, ignore_eos=True)
_STREAMED_S = 4.0  # of calls whose first tokens are timed
_AHEAD_S = 2.0  # from a start to the call that it was made for
_ONE = Sampling(temperature=0, max_tokens=1, ignore_eos=True)
_numbers = itertools.count(1000)


def measure(
    model: Path, adapter: Path, counts: list[int], seconds: float, slice_s: float
) -> dict[str, Any]:
    """Return times of starts, a row per number of functions that work at once, and, where
    `slice_s` is not 0, the simulator's times as they are here, and a slice of so many seconds of
    arrivals, run and simulated. Each part is printed as it is known."""
    with Agent(model, max_lora_rank=16, **_SIZES) as agent:
        starts = _starts(agent.function(adapter, name="start"))
    print(starts, flush=True)
    rows = []
    for count, turns in itertools.product(counts, (True, False)):
        rates = _rates(model, adapter, count, seconds, turns)
        rows.append({"functions": count, "turns": turns, **rates})
        print(rows[-1], flush=True)
    calibrated = calibration.measure(model, adapter, _SIZES, slice_s) if slice_s else {}
    return {"starts": starts, "rates": rows, **calibrated}


def _starts(function: Function) -> dict[str, Any]:
    """Return medians: of a start from the zygote, of first answers, and of later ones.

    `preloaded_s` are the first three calls of a process that was started before them, `paused_s`
    is a call of one that has answered, after as long a pause; with `processor_s` in the name, what
    the function's process spent of them.
    """
    function.generate(_new_prompt(), _ONE)  # its programs are kept from now on
    whole, ready, warm, preloaded, paused = [], [], [], [], []
    for _ in range(_STARTS):
        function.offload()
        start = time.perf_counter()  # a look at the process would start it before
        function.generate(_new_prompt(), _ONE)
        whole.append(time.perf_counter() - start)
        ready.append(function.start_times["start_s"])
        warm.append(_first(function)[0])
    for _ in range(_STARTS):
        function.offload()
        function.warm()
        time.sleep(_AHEAD_S)
        preloaded.append([_first(function) for _ in range(3)])
        time.sleep(_AHEAD_S)
        paused.append(_first(function))
    found = {"first_answer_s": whole, "ready_s": ready, "warm_answer_s": warm}
    found |= {"paused_s": [one[0] for one in paused]}
    found |= {"paused_processor_s": [one[1] for one in paused]}
    medians: dict[str, Any] = {name: round(statistics.median(x), 4) for name, x in found.items()}
    for place, name in enumerate(("preloaded_s", "preloaded_processor_s")):
        calls = zip(*([call[place] for call in one] for one in preloaded), strict=True)
        medians[name] = [round(statistics.median(call), 4) for call in calls]
    return medians


def _first(function: Function) -> tuple[float, float]:
    """Return the seconds of an answer of one token, and those that its process' threads ran."""
    prompt, busy, start = _new_prompt(), _run_s(function.pid), time.perf_counter()
    function.generate(prompt, _ONE)
    seconds = time.perf_counter() - start
    return seconds, _run_s(function.pid) - busy


def _new_prompt() -> str:
    """Return a text of which the prefix cache has nothing."""
    return f"{next(_numbers)} is the number of the contract that the court has held to be void."


def _run_s(pid: int) -> float:
    """Return the seconds that the threads of a process have run."""
    ran = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            ran += int(file.read_text().split()[0])
    return ran / 1e9


def _rates(model: Path, adapter: Path, count: int, seconds: float, turns: bool) -> dict[str, Any]:
    """Return tokens a second of a lone function and of all at once, in alternating rounds.

    A lone one has the whole machine, as each of several has in its turn: `share` is the part of
    the lone rate that all together keep, the median of the rounds. `p95_ttft_ms` is of streams of
    64 tokens, one at a time to each function.
    """
    slo_s = _SLO_S if turns else None
    with Agent(model, ttft_slo_s=slo_s, max_lora_rank=16, **_SIZES) as agent:
        functions = [agent.function(adapter, name=f"f{i}") for i in range(count)]
        lone, together = [], []
        for function in functions:
            function.generate(_PROMPTS, Sampling(max_tokens=8))
        for round_ in range(_ROUNDS):
            lone.append(token_rate([functions[round_ % count]], _PROMPTS, _LONG, seconds))
            together.append(token_rate(functions, _PROMPTS, _LONG, seconds))
        keeper = agent.turns
        parts = {} if keeper is None else hand_overs.summary([*keeper.log.turns])
        first = first_tokens(functions, _STREAMED_S)
    return {
        "lone_tokens_per_s": round(statistics.median(lone)),
        "together_tokens_per_s": round(statistics.median(together)),
        "share": round(statistics.median(b / a for a, b in zip(lone, together, strict=True)), 3),
        "p95_ttft_ms": round(1e3 * sorted(first)[int(0.95 * len(first))], 1),
        **({"hand_over_ms": parts} if parts else {}),
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


def first_tokens(
    functions: list[Function], seconds: float, prompt: Callable[[], Any] | None = None
) -> list[float]:
    """Return seconds to the first tokens of streams; each function always answers one. `prompt`
    makes one, of text or tokens."""
    end, found = time.perf_counter() + seconds, []

    def call(function: Function) -> None:
        while (start := time.perf_counter()) < end:
            pieces = iter(function.stream((prompt or _new_prompt)(), _STREAM))
            next(pieces)
            found.append(time.perf_counter() - start)
            for _ in pieces:
                pass

    threads = [threading.Thread(target=call, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
