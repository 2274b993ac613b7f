"""Price of each isolation level on this machine: the same tenants, apart by nothing, or by more.

Rounds of the levels alternate, so that a machine that others load too is as loaded for each. A
level's price is also given in processor time a token, over all of its processes.
"""

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_jax.adapters.formats.peft_format import CONFIG_FILE
from serving import Sampling
from serving.api.functions_config import ISOLATIONS
from serving.functions import Agent, Function

_ROWS = 8  # requests of each tenant at a time
_TOKENS = 64
_TICK = os.sysconf("SC_CLK_TCK")


def measure(
    model: Path,
    adapter: Path,
    tenants: int,
    seconds: float,
    rounds: int,
    levels: Sequence[str] = ISOLATIONS,
) -> list[dict[str, Any]]:
    """Return a row per level, the first of which is "none": rates of all tenants together, start of
    one, memory of all."""
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_lora_rank": 16}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        folders = copies(adapter, Path(folder), tenants)
        agents: dict[str, Agent] = {}
        for level in levels:
            engines = tenants if level == "process" else 1
            most = {} if level == "process" else {"max_tenants": tenants}
            own = {"max_num_seqs": _ROWS * tenants // engines, "isolation": level, **most}
            agents[level] = stack.enter_context(Agent(model, **sizes, **own))
            for one in folders:
                agents[level].function(one)
        for agent in agents.values():
            _round(agent, 0.5)
        rates: dict[str, list[tuple[float, float]]] = {level: [] for level in agents}
        for _ in range(rounds):
            for level, agent in agents.items():
                rates[level].append(_round(agent, seconds))
        return [_row(level, agents[level], rates) for level in agents]


def copies(adapter: Path, folder: Path, count: int) -> list[Path]:
    """Write so many adapters, each a little other than the given one; return their folders."""
    found = []
    for number in range(count):
        made = folder / f"tenant-{number}"
        made.mkdir()
        for file in adapter.iterdir():
            (made / file.name).write_bytes(file.read_bytes())
        config = json.loads((made / CONFIG_FILE).read_text())
        config["lora_alpha"] *= 1 + number / 64
        (made / CONFIG_FILE).write_text(json.dumps(config))
        found.append(made)
    return found


def _row(level: str, agent: Agent, rates: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Return a level's row; shares are medians over rounds of what "none" had in the same one."""
    pairs = list(zip(rates[level], rates["none"], strict=True))
    functions = list(agent.functions.values())
    pids = {function.pid for function in functions} | engine_pids(agent)
    private = sum(map(_private_bytes, pids))  # before processes end and start
    starts = [_start_s(function) for function in functions[:4]]
    return {
        "isolation": level,
        "tenants": len(functions),
        "processes": len(pids),
        "tokens_per_s": round(statistics.median(rate for rate, _ in rates[level])),
        "share_of_rate": round(statistics.median(a[0] / b[0] for a, b in pairs), 3),
        "cpu_us_per_token": round(statistics.median(cpu for _, cpu in rates[level]), 1),
        "share_by_cpu": round(statistics.median(b[1] / a[1] for a, b in pairs), 3),
        "start_s": round(statistics.median(starts), 3),
        "private_mb_of_all": round(private / 1e6, 1),
    }


def engine_pids(agent: Agent) -> set[int]:
    """Return the process of the engine that functions share, if they do."""
    engine = agent.engine
    return set() if engine is None else {engine.pid}


def _start_s(function: Function) -> float:
    function.offload()
    start = time.perf_counter()
    function.warm()
    return time.perf_counter() - start


def _round(agent: Agent, seconds: float) -> tuple[float, float]:
    """Return tokens a second of all tenants, and microseconds of processor time a token."""
    sampling = Sampling(temperature=0, max_tokens=_TOKENS, ignore_eos=True)
    functions = list(agent.functions.values())
    pids = {function.pid for function in functions} | engine_pids(agent)
    end, made, lock = time.perf_counter() + seconds, [0], threading.Lock()

    def call(function: Function) -> None:
        while time.perf_counter() < end:
            outputs = function.generate(["The court"] * _ROWS, sampling)
            with lock:
                made[0] += sum(len(o.outputs[0].token_ids) for o in outputs)

    before, start = sum(map(_cpu_s, pids)), time.perf_counter()
    threads = [threading.Thread(target=call, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    return made[0] / took, 1e6 * (sum(map(_cpu_s, pids)) - before) / made[0]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
