"""Loss and time of the greedy policies: 50 functions, 20 backbones, 20 containers, 20 devices.

Decisions of an agent are timed alone, and so is the memory of a process that makes them.
"""

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.functions.exact import best_value
from serving.functions.policies import batching, offload, preload, turns
from serving.functions.policies.artifacts import Artifact, Place

_GB = 1 << 30
_CALLS = 1000  # of one decision, which are timed together
# Says the peak of its memory in kB; status 1 if the agent imports JAX.
_AGENT = """
import sys
import serving.functions.agent
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1])
sys.exit("jax" in sys.modules)
"""


def instance(seed: int, functions: int = 50, backbones: int = 20, places: int = 20):
    """Return artifacts, rates and places: models of 7B to 13B, rates over three decades."""
    rng = random.Random(seed)
    rates = {f"f{f}": 10 ** rng.uniform(-3, 0) for f in range(functions)}
    artifacts = []
    for b in range(backbones):
        gb, users = rng.choice([13.5, 16.0, 26.0]), tuple(list(rates)[b::backbones])
        name = f"backbone-{b}"
        artifacts.append(Artifact(name, int(gb * _GB), users, gb * 0.3, gb * 0.35))
        for f in users:
            libraries, gb = int(rng.uniform(1, 4) * _GB), rng.uniform(0.05, 0.5)
            needs = (f"libraries-{f}", name)
            artifacts += [
                Artifact(f"libraries-{f}", libraries, (f,), rng.uniform(2, 6)),
                Artifact(f"adapter-{f}", int(gb * _GB), (f,), gb * 2, gb * 3, needs),
                Artifact(
                    f"context-{f}",
                    int(rng.uniform(0.4, 0.8) * _GB),
                    (f,),
                    device_s=rng.uniform(1, 3),
                    requires=(f"adapter-{f}",),
                ),
            ]
    room = [Place(f"C{c}", int(rng.uniform(4, 32) * _GB), False) for c in range(places)]
    room += [Place(f"G{g}", int(rng.uniform(8, 40) * _GB), True) for g in range(places)]
    return artifacts, rates, room


def measure(instances: int, limit_s: float) -> dict[str, Any]:
    """Return losses against HiGHS and seconds of processor time, for both policies.

    The seconds of an instance are the fastest of ten runs.
    """
    rows = []
    for seed in range(instances):
        case = instance(seed)
        runs = []
        for _ in range(10):
            start = time.process_time()
            loads = preload.plan(*case)
            runs.append(time.process_time() - start)
        seconds = min(runs)
        value = preload.value_of(loads, *case)
        best, bound = best_value(*case, limit_s)
        rows.append(
            {
                "loss": 1 - value / max(best, value),
                "loss_at_most": 1 - value / max(bound, value),
                "seconds": seconds,
            }
        )
    keys = ("loss", "loss_at_most", "seconds")
    means = {key: statistics.fmean(row[key] for row in rows) for key in keys}
    return {
        "preload": means | {"instances": instances},
        "offload": measure_offload(instances),
        "decisions": measure_decisions(),
        "agent_bytes": agent_bytes(),
    }


def measure_decisions(functions: int = 8) -> dict[str, float]:
    """Return seconds of processor time of one turn of `functions`, and of one batch of as many."""
    rng = random.Random(0)
    contenders = [
        turns.Contender(f"f{f}", rng.uniform(0.1, 2), rng.uniform(0, 1), rng.uniform(0.01, 0.1))
        for f in range(functions)
    ]
    arrivals = sorted(rng.uniform(0, 1) for _ in range(functions))
    times = batching.PrefillTime(0.02, 0.01)

    def batch() -> float:
        largest = batching.largest_batch(times, 2.5, 2 * functions)
        return batching.leaves_at(times, 2.5, largest, arrivals, 1.0)

    return {
        "turn_s": _seconds(lambda: turns.in_turn(contenders)),
        "batch_s": _seconds(batch),
        "functions": functions,
    }


def _seconds(decide: Callable[[], object]) -> float:
    """Return the seconds of one call, of the fastest of ten runs."""
    runs = []
    for _ in range(10):
        start = time.process_time()
        for _ in range(_CALLS):
            decide()
        runs.append(time.process_time() - start)
    return min(runs) / _CALLS


def agent_bytes() -> int:
    """Return the bytes that a process with the agent's modules takes; RuntimeError with JAX."""
    found = subprocess.run([sys.executable, "-c", _AGENT], capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"An agent's process imports JAX, or fails: {found.stderr}")
    return int(found.stdout) << 10


def measure_offload(instances: int) -> dict[str, float]:
    """Return the mean seconds of a plan among 200 artifacts, the fastest of ten runs each."""
    seconds = []
    for seed in range(instances):
        rng = random.Random(seed)
        residents = [
            offload.Resident(str(i), rng.randint(50, 600), rng.random()) for i in range(200)
        ]
        runs = []
        for _ in range(10):
            start = time.process_time()
            offload.plan(residents, 20_000)
            runs.append(time.process_time() - start)
        seconds.append(min(runs))
    return {"seconds": statistics.fmean(seconds), "artifacts": 200}
