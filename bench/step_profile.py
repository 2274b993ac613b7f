"""Which kernels one step consists of: device time by kind of kernel, from jax's profiler."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import jax

STEPS = 3
TOP = 14
KINDS = {  # the first that matches a kernel's name
    "experts": r"grouped_matmul",
    "rerouting": r"reroute|row_map|sort_rows",
    "attention": r"attention|attend",
    "LoRA": r"lora|shrink|expand",
    "dense matmul": r"gemm|gemv|nvjet|cutlass|cublas|dot|matmul|splitk",
    "copies": r"memcpy|copy|memset",
}


def profile_step(step: Callable[[], object]) -> dict[str, tuple[float, float]]:
    """Return (launches, microseconds) per step of every kernel on the device."""
    jax.block_until_ready(step())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                last = step()
            jax.block_until_ready(last)
        found: dict[str, list[float]] = defaultdict(list)
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith("/device:"):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            found[event.name].append(event.duration_ns / 1e3)
    return {name: (len(took) / STEPS, sum(took) / STEPS) for name, took in found.items()}


def show_profile(title: str, kernels: dict[str, tuple[float, float]]) -> str:
    """Return a table: the kinds, then the kernels that take longest."""
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, (launches, took) in kernels.items():
        said = name.lower()
        kind = next((k for k, pattern in KINDS.items() if re.search(pattern, said)), "other")
        kinds[kind][0] += launches
        kinds[kind][1] += took
    total = sum(took for _, took in kernels.values())
    lines = [f"profile of one step, {title}: {total:.0f} us of kernels"]
    for kind, (launches, took) in sorted(kinds.items(), key=lambda item: -item[1][1]):
        lines.append(f"  {kind:14} {took:9.1f} us in {launches:6.1f} launches")
    for name, (launches, took) in sorted(kernels.items(), key=lambda item: -item[1][1])[:TOP]:
        lines.append(f"    {took:9.1f} us {launches:6.1f} x {name[:90]}")
    return "\n".join(lines)
