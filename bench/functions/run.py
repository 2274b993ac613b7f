"""One simulated run: a system over the arrivals of its functions."""

from typing import Any

from bench.functions.device import FunctionState
from bench.functions.result import figures
from bench.functions.simulator import Simulation
from bench.functions.systems import System
from bench.functions.times import Times
from bench.functions.traces import WINDOW_MINUTES

SECONDS = 60.0 * WINDOW_MINUTES


def simulate(system: System, times: Times, arrivals: list[list[float]]) -> dict[str, Any]:
    """Return the figures of one system; the functions are shared out over the models in order."""
    half = -(-len(arrivals) // len(times.models))
    functions = [
        FunctionState(f"f{i}", times.models[i // half], moments)
        for i, moments in enumerate(arrivals)
    ]
    if system.one_engine:
        functions = [
            FunctionState(
                m.name, m, sorted(t for f in functions if f.model is m for t in f.arrivals)
            )
            for m in times.models
        ]
    run = Simulation(system, times, functions)
    run.run(SECONDS)
    return figures(run, SECONDS)
