"""The launches of one layer of a step in their order, from jax's profiler.

Kernels of equal name tell apart here which product of a layer takes how long. A layer begins where
its keys and values are put into pages.
"""

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from bench.step_profile import kernels_in

FIRST_OF_LAYER = "place_heads"
_RUNS = 3


class Launch(NamedTuple):
    """One launch: its name, when it began, and how long it ran, in us."""

    name: str
    begin: float
    us: float


def launches_of(step: Callable[[], object]) -> list[Launch]:
    """Return the launches of one step in their order; none where the profiler sees none.

    The step is run a few times, each waited for; the last one's launches are returned.
    """
    jax.block_until_ready(step())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_RUNS):
                jax.block_until_ready(step())
        events = kernels_in(Path(folder))
    found = [Launch(_short(name), start / 1e3, took / 1e3) for name, start, took in events]
    found.sort(key=lambda launch: launch.begin)
    return found[-(len(found) // _RUNS) :] if found else []


def layer_of(launches: Sequence[Launch]) -> tuple[list[Launch], float]:
    """Return a layer's launches with medians over the layers of a step, and a layer's us in all.

    Times begin at the layer's first launch. The last layer, which the head follows, does not count,
    nor does a layer of other launches than most. Empty and 0 for a step of fewer than three layers.
    """
    begins = [n for n, launch in enumerate(launches) if launch.name.startswith(FIRST_OF_LAYER)]
    spans = []
    for begin, end in itertools.pairwise(begins):
        layer = launches[begin:end]
        names = tuple(launch.name for launch in layer)
        spans.append((names, layer, launches[end].begin - layer[0].begin))
    if len(spans) < 2:
        return [], 0.0
    names = statistics.mode(name for name, *_ in spans)
    alike = [(layer, span) for name, layer, span in spans if name == names]
    middle = [
        Launch(
            name,
            statistics.median(layer[n].begin - layer[0].begin for layer, _ in alike),
            statistics.median(layer[n].us for layer, _ in alike),
        )
        for n, name in enumerate(names)
    ]
    return middle, statistics.median(span for _, span in alike)


def show_layer(layer: Sequence[Launch], span: float) -> str:
    """Return a table: when each launch of a layer begins, and how long it runs."""
    lines = [f"a layer: {span:.1f} us, {sum(launch.us for launch in layer):.1f} in its kernels"]
    lines += [f"  {one.begin:8.1f} {one.us:8.2f} us  {one.name}" for one in layer]
    return "\n".join(lines)


def _short(name: str) -> str:
    """Return a kernel's name without result, namespace, template and parameters."""
    return name.removeprefix("void ").replace("lora_jax::", "").split("(")[0].split("<")[0]
