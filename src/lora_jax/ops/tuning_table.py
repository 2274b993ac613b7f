"""Looks tile configurations up while tracing: data per kind of device, found by the nearest shape.

A table is `tuned/<device kind>/<op>.json`, written by `python -m lora_jax.ops.tuning`. Nothing of
it is in a compiled program but the choice (V-LoRA, section 4.3: found offline, picked by shape).
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import jax

TABLES = Path(__file__).parent / "tuned"
FARTHEST = 1.0  # in powers of two: a shape is served by one at most twice or half as large


def device_folder(kind: str) -> str:
    """Return the folder of a kind of device: "NVIDIA H200" is "nvidia_h200"."""
    return "_".join(kind.lower().split())


def distance(shape: Mapping[str, int], other: Mapping[str, int]) -> float | None:
    """Return how far two shapes are apart, in powers of two over all sizes; None: too far."""
    if shape.keys() != other.keys():
        return None
    steps = [abs(math.log2(size / other[name])) for name, size in shape.items()]
    return sum(steps) if max(steps, default=0.0) <= FARTHEST else None


def find[Config](
    op: str, shape: Mapping[str, int], config: type[Config], *, device: str | None = None
) -> Config | None:
    """Return the configuration of the nearest shape that was tuned, or None.

    `device` is a device kind, by default that of the first device of this process.
    """
    kind = jax.devices()[0].device_kind if device is None else device
    near = [
        (apart, index, entry)
        for index, entry in enumerate(read(TABLES / device_folder(kind) / f"{op}.json"))
        if (apart := distance(shape, entry["shape"])) is not None
    ]
    return config(**min(near, key=lambda n: n[:2])[2]["config"]) if near else None


@functools.cache
def read(table: Path) -> tuple[dict, ...]:
    """Return a table's entries; none where there is no such file."""
    return tuple(json.loads(table.read_text())["entries"]) if table.exists() else ()
