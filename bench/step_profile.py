"""Device time of one step by kind of kernel, from jax's profiler."""

import bisect
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

STEPS = 3
TOP = 14
KEPT = 40  # kernels of a profile in a JSON file
_TURN = "turn of a step "
KINDS = {  # the first that matches a kernel's name
    "experts": r"grouped_matmul",
    "rerouting": r"reroute|row_map|sort_rows",
    "attention": r"attention|attend",
    "LoRA": r"lora|shrink|expand",
    "dense matmul": r"gemm|gemv|nvjet|cutlass|cublas|dot|matmul|splitk",
    "copies": r"memcpy|copy|memset",
}


Kernels = dict[str, tuple[float, float]]  # name -> launches and microseconds of one step


def profile_step(step: Callable[[], object]) -> Kernels:
    """Return the kernels of a step on the device; empty where the profiler sees none."""
    return profile_in_turn({"step": step}, 1)["step"][0]


def profile_in_turn(
    steps: Mapping[str, Callable[[], object]], turns: int
) -> dict[str, list[Kernels]]:
    """Return the kernels of each step in every turn, all profiled in one session.

    While it profiles, XLA launches kernels one by one and not as a CUDA graph: what lies between
    them is none of the step's.
    """
    for step in steps.values():
        jax.block_until_ready(step())
    order = [name for turn in range(turns) for name in list(steps)[:: -1 if turn % 2 else 1]]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for place, name in enumerate(order):
                with jax.profiler.TraceAnnotation(f"{_TURN}{place}"):
                    for _ in range(STEPS):
                        last = steps[name]()
                    jax.block_until_ready(last)
        kernels = _kernels(Path(folder), len(order))
    return {
        name: [kernels[place] for place, its in enumerate(order) if its == name] for name in steps
    }


def device_span(step: Callable[[], object]) -> tuple[float, float] | None:
    """Return ms from the first kernel's start to the last one's end, and those of all kernels.

    None where the profiler sees none. Copies between host and device are no kernels.
    """
    jax.block_until_ready(step())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step())
        events = kernels_in(Path(folder))
    if not events:
        return None
    span = max(start + took for _, start, took in events) - min(start for _, start, _ in events)
    return span / 1e6, sum(took for *_, took in events) / 1e6


def kernels_in(folder: Path) -> list[tuple[str, float, float]]:
    """Return name, start and duration in ns of a session's kernels. Copies are none."""
    return [
        (event.name, event.start_ns, event.duration_ns)
        for file in folder.rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        if plane.name.startswith("/device:") and line.name.startswith("Stream")
        for event in line.events
        if not event.name.startswith("Memcpy")
    ]


def _kernels(folder: Path, turns: int) -> list[Kernels]:
    """Return the kernels of a step in each turn of a session whose files lie in a folder."""
    begun, events = [0.0] * turns, []
    for file in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                if plane.name.startswith("/device:"):
                    if line.name.startswith("Stream"):
                        events += [(e.start_ns, e.name, e.duration_ns / 1e3) for e in line.events]
                    continue
                for event in line.events:
                    if event.name.startswith(_TURN):
                        begun[int(event.name.removeprefix(_TURN))] = event.start_ns
    results: list[dict[str, list[float]]] = [defaultdict(list) for _ in range(turns)]
    for start, name, us in events:
        results[max(bisect.bisect_right(begun, start) - 1, 0)][name].append(us)
    return [
        {name: (len(took) / STEPS, sum(took) / STEPS) for name, took in turn.items()}
        for turn in results
    ]


def longest(kernels: Kernels, parts: int = 1) -> Kernels:
    """Return the kernels that take longest, with the share that one of equal parts has in them."""
    kept = sorted(kernels.items(), key=lambda item: -item[1][1])[:KEPT]
    return {name: (round(n / parts, 2), round(us / parts, 2)) for name, (n, us) in kept}


def show_profile(title: str, kernels: Kernels) -> str:
    """Return a table: the kinds, then the kernels that take longest."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (launches, took) in kernels.items():
        text = name.lower()
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, text)), "other")
        kinds[kind][0] += launches
        kinds[kind][1] += took
    total = sum(took for _, took in kernels.values())
    lines = [f"profile of one step, {title}: {total:.0f} us of kernels"]
    for kind, (launches, took) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        lines.append(f"  {kind:14} {took:9.1f} us in {launches:6.1f} launches")
    for name, (launches, took) in sorted(kernels.items(), key=lambda item: -item[1][1])[:TOP]:
        lines.append(f"    {took:9.1f} us {launches:6.1f} x {name[:90]}")
    return "\n".join(lines)
