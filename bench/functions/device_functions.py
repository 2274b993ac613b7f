"""Functions of a large backbone on this machine's device: starts by what is there, bytes of each,
turns, and answers beside those of one engine with all adapters. This process has no device."""

import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.functions import device_batches, hand_overs
from bench.functions.large_model import SHAPES, write_adapters, write_large
from bench.functions.measured import token_rate
from bench.random_model import LlamaShape
from serving import Sampling
from serving.functions import Agent, Function
from serving.functions.policies.batching import fit

FIELDS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 1024,
    "max_num_batched_tokens": 32,
    "max_lora_rank": 16,
    "kv_cache_memory_bytes": 2 << 30,
}
PROMPTS = [list(range(100, 150)), list(range(200, 237))]  # of token ids
_numbers = itertools.count(1)  # of prompts that no other one begins as
_STARTS, _WARM, _ANSWER = 3, 15, 16
_ANSWERING = 4  # functions whose answers are compared
_NEXT = 2  # calls behind the first one of a pre-loaded function
_AHEAD_S = 3.0  # from a start to the call that it was made for
_BATCHES, _REPEATS, _DECODED = (1, 2, 4, 8), 5, 64
_ROUNDS, _BATCH, _TURN_TOKENS = 3, 8, 32  # of turns: each call fills a function's rows
PARTS = "turns", "starts", "answers"
MORE_PARTS = "batches", "slicing"  # with agents of their own
_SLO = 5  # times the first token of one request (ServerlessLoRA, 5.10)


def measure(
    shape: str,
    counts: list[int],
    seconds: float,
    parts: Sequence[str] = PARTS,
    told: Any = None,
    quiet: Any = contextlib.nullcontext,
) -> dict[str, Any]:
    """Return what was found of these parts, in their order.

    Each is printed as it is known, or given to `told`.
    `quiet()` is a context in which nothing else uses the device: times are taken there.
    """
    told = told or functools.partial(print, flush=True)
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        model, start = Path(scratch) / "model", time.perf_counter()
        write_large(model, SHAPES[shape])
        num_adapters = max(2, *counts, _ANSWERING if "answers" in parts else 1)
        adapters = write_adapters(Path(scratch) / "adapters", SHAPES[shape], num_adapters)
        found: dict[str, Any] = {"shape": shape, "fields": FIELDS}
        found["written_s"] = round(time.perf_counter() - start, 1)

        def add(**more: Any) -> None:
            found.update(more)
            told(json.dumps(more))

        told(json.dumps(found))
        add(bare_context_mib=_bare_context_mib())
        if {*parts} & {*PARTS}:
            _functions(model, adapters, counts, seconds, parts, found, add, quiet)
        if "answers" in parts:
            add(coupled=_coupled(model, adapters[:_ANSWERING]))
            pairs = zip(found["answers"], found["coupled"]["answers"], strict=True)
            add(same_answers=[a == b for a, b in pairs])
            del found["answers"], found["coupled"]["answers"]
        if "batches" in parts:
            with quiet():
                sizes = _token_bytes(SHAPES[shape]), seconds, device_mib
                add(batches=device_batches.batches(model, adapters[:2], *sizes))
        if "slicing" in parts:
            with quiet():
                add(slicing=device_batches.slicing(model, adapters, counts, seconds))
        return found


def _functions(
    model: Path,
    adapters: list[Path],
    counts: list[int],
    seconds: float,
    parts: Sequence[str],
    found: dict[str, Any],
    add: Any,
    quiet: Any,
) -> None:
    before, start = device_mib(), time.perf_counter()
    with Agent(model, **FIELDS) as agent:
        add(
            agent_s=round(time.perf_counter() - start, 2),
            backbone_mib=agent.backbone_bytes / 2**20,
            backbone_used_mib=device_mib() - before,
        )
        functions, used, starts = [], [], []
        for adapter in adapters:
            start, before = time.perf_counter(), device_mib()
            functions.append(agent.function(adapter))
            functions[-1].generate(PROMPTS, _greedy(2))
            starts.append(round(time.perf_counter() - start, 2))
            used.append(device_mib() - before)
            add(**{f"start_{len(starts)}": (starts[-1], used[-1], functions[-1].start_times)})
        add(first_starts_s=starts, used_mib=used, overhead_mib=_overheads(used))
        if "turns" in parts:
            with quiet():
                for count in counts:
                    add(**{f"turns_{count}": _turns(agent, functions[:count], seconds)})
        if "starts" in parts:
            with quiet():
                add(start=_starts(agent, functions[0]))
                add(times=_times(found, functions[0]))
        if "answers" in parts:
            functions[1].offload()
            os.kill(functions[2].pid, signal.SIGKILL)
            time.sleep(0.2)
            add(answers=[_answers(f) for f in functions[:_ANSWERING]])


def _overheads(used: list[float]) -> list[float]:
    return [one - FIELDS["kv_cache_memory_bytes"] / 2**20 for one in used]


def _starts(agent: Agent, function: Function) -> dict[str, Any]:
    """Return seconds to the first token by what is there, medians or the one time."""
    warm = statistics.median(_first_s(function) for _ in range(_WARM))
    zygote, ready, nothing = [], [], []
    for _ in range(_STARTS):
        function.offload()
        zygote.append(_first_s(function))
        ready.append(function.start_times)
    for _ in range(2):
        function.offload()
        agent._zygote.kill()
        nothing.append(_first_s(function))
    found = {"warm_s": warm, "zygote_s": zygote, "ready": ready, "no_zygote_s": nothing}
    preloaded = [_preloaded_s(function) for _ in range(_STARTS)]
    return found | {"preloaded_s": preloaded, "paused_s": [_paused_s(function) for _ in range(2)]}


def _preloaded_s(function: Function) -> list[float]:
    """Return seconds to the first tokens of the first calls of a function started ahead of them."""
    function.offload()
    function.warm()
    return [_paused_s(function), *(_first_s(function) for _ in range(_NEXT))]


def _paused_s(function: Function) -> float:
    """Return seconds to the first token after as long a pause as before a pre-loaded call's."""
    time.sleep(_AHEAD_S)
    return _first_s(function)


def _times(found: dict[str, Any], function: Function) -> dict[str, Any]:
    """Return fields of `times.Times` as they are on this device, for `--simulate --times`."""
    first = {size: _seconds(function, size, 1) for size in _BATCHES}
    line = fit(list(first), list(first.values()))
    step_s = (_seconds(function, 1, _DECODED + 1) - first[1]) / _DECODED
    shape, start = SHAPES[found["shape"]], found["start"]
    gigabytes = found["backbone_mib"] * 2**20 / 1e9
    overhead = statistics.median(found["overhead_mib"]) * 2**20 / 1e9
    zygote_s = statistics.median(start["zygote_s"])
    return {
        "models": [
            {
                "name": found["shape"],
                "backbone_gb": gigabytes,
                "prefill": {"base_s": line.base_s, "slope_s": line.slope_s},
                "slo_s": _SLO * line.base_s,
                "decode_step_s": step_s,
                "kv_gb": FIELDS["max_model_len"] * _token_bytes(shape) / 1e9,
                "largest_batch": FIELDS["max_num_seqs"],
            }
        ],
        "libraries_s": statistics.median(start["no_zygote_s"]) - zygote_s,
        "context_s": zygote_s - start["warm_s"],
        "context_gb": overhead,
        "storage_gb_per_s": gigabytes / found["agent_s"],
    }


def _token_bytes(shape: LlamaShape) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    return 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def _seconds(function: Function, prompts: int, tokens: int) -> float:
    """Return the median seconds of so many prompts at once, each with so many tokens."""
    found = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        function.generate([new_prompt() for _ in range(prompts)], _greedy(tokens))
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _first_s(function: Function) -> float:
    start = time.perf_counter()
    function.generate([new_prompt()], _greedy(1))
    return time.perf_counter() - start


def new_prompt() -> list[int]:
    """Return a prompt as long as the first one, of which the prefix cache has nothing."""
    return [300 + next(_numbers) % 200, *PROMPTS[0][1:]]


def _answers(function: Function) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in function.generate(PROMPTS, _greedy(_ANSWER))]


def _turns(agent: Agent, functions: list[Function], seconds: float) -> dict[str, Any]:
    """Return tokens a second of a lone function and of all at once, in alternating rounds.

    "apart" is the rate of one round in which a turn begins when nothing of the one before runs;
    the parts of a hand-over, in ms, stand beside both.
    """
    keeper, lone, together = agent.turns, [], []
    assert keeper is not None, "functions without turns"
    work = ([PROMPTS[0]] * _BATCH, _greedy(_TURN_TOKENS), seconds)
    keeper.log.turns.clear()
    for number in range(_ROUNDS):
        lone.append(token_rate([functions[number % len(functions)]], *work))
        together.append(token_rate(functions, *work))
    parts = hand_overs.summary([*keeper.log.turns])
    keeper.log.turns.clear()
    keeper.table.overlaps = False
    apart = token_rate(functions, *work)
    keeper.table.overlaps = True
    share = statistics.median(b / a for a, b in zip(lone, together, strict=True))
    return {
        "functions": len(functions),
        "lone_tokens_per_s": [round(rate) for rate in lone],
        "together_tokens_per_s": [round(rate) for rate in together],
        "share": round(share, 3),
        "hand_over_ms": parts,
        "apart_tokens_per_s": round(apart),
        "apart_hand_over_ms": hand_overs.summary([*keeper.log.turns]),
    }


def _greedy(tokens: int) -> Sampling:
    return Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)


def _coupled(model: Path, adapters: list[Path]) -> dict[str, Any]:
    """Return what one engine with these adapters gives, in a process that ends with it."""
    order = json.dumps({"model": str(model), "adapters": [str(a) for a in adapters]})
    command = [sys.executable, "-m", "bench.functions.coupled", order]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if ran.returncode:
        raise RuntimeError(f"{ran.stdout[-2000:]} {ran.stderr[-4000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def _bare_context_mib() -> float:
    """Return the bytes that a process takes which has done nothing but one sum."""
    code = "import jax.numpy as jnp; print(jnp.zeros(1).block_until_ready(), flush=True); input()"
    before = device_mib()
    one = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # else three quarters of all
    )
    assert one.stdout is not None
    one.stdout.readline()
    used = device_mib() - before
    one.communicate(b"\n")
    return used


def device_mib() -> float:
    """Return the bytes in use on this machine's device, by whatever process; 0: no NVIDIA GPU."""
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", card]
    try:
        return float(subprocess.run(asked, capture_output=True, text=True).stdout)
    except (FileNotFoundError, ValueError):
        return 0.0
