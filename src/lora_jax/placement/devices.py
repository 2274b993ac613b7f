"""Number and layout of a LoRA Server's devices (InfiniLoRA, section 4.2). No jax."""

import dataclasses

from lora_jax.placement.chooser import cheapest_placement
from lora_jax.placement.ep_pp import ServerLayout, divisors, possible_degrees
from lora_jax.placement.service_level import (
    LayerBudget,
    Profile,
    meets_latency,
    meets_throughput,
)
from lora_jax.placement.shape import AdapterShape


@dataclasses.dataclass(frozen=True)
class Instances:
    """The LLM instances: how many (L), devices of each (p), and the batch of each (B)."""

    count: int
    ranks: int
    batch: float

    def __post_init__(self) -> None:
        if self.count < 1 or self.ranks < 1 or not 0 <= self.batch < float("inf"):
            raise ValueError(
                "There must be at least one instance of at least one device, and a batch from 0 "
                f"on, got {self}."
            )


def minimum_devices(
    shape: AdapterShape,
    device_bytes: int,
    instances: Instances,
    profile: Profile,
    budget: LayerBudget,
    most: int,
) -> ServerLayout:
    """Return the layout with the fewest devices that holds the adapters and meets Eq. 5 and 6.

    `shape.adapters` is the M* of Algorithm 1. Of several EPx-PPy on that number of devices the
    one with the least measured time per layer is taken. Only x are considered that were measured
    and whose expert shards line up with the instances'. Raises ValueError that says which of the
    bounds no number of devices up to `most` meets.
    """
    if shape.experts % instances.ranks:
        raise ValueError(
            f"{shape.experts} experts cannot be split evenly over an instance's "
            f"{instances.ranks} devices; choose from {divisors(shape.experts)}."
        )
    fast = _fast_enough(instances, profile, budget)
    for devices in range(1, most + 1):
        layouts = [ServerLayout(shape, ep=x, pp=y) for x, y in possible_degrees(shape, devices)]
        large = [layout.ep for layout in layouts if layout.capacity(device_bytes) >= shape.adapters]
        fitting = {x: fast[x] for x in large if x in fast}
        if fitting:
            return cheapest_placement(shape, devices, fitting)
    need = shape.adapters * shape.adapter_bytes / device_bytes
    raise ValueError(
        f"{shape.adapters} adapters of {shape.adapter_bytes:,} bytes fill {need:.1f} devices of "
        f"{device_bytes:,} bytes, and no layout with x from {sorted(fast)} on at most {most} "
        "devices holds them. Allow more devices, a lower admission rate or a lower rank, or "
        "measure other x."
    )


def _fast_enough(instances: Instances, profile: Profile, budget: LayerBudget) -> dict[int, float]:
    """Return the measured seconds per layer of every x that lines up and meets Eq. 5 and 6."""
    ranks = instances.ranks
    aligned = [x for x in profile.degrees if x % ranks == 0 or ranks % x == 0]
    if not aligned:
        raise ValueError(
            f"No measured x of {profile.degrees} lines up with instances of {ranks} devices; one "
            "must divide the other. Measure such an x."
        )
    times = {x: profile.times(x, instances.batch) for x in aligned}
    quick = [x for x in aligned if meets_latency(times[x], budget)]
    if not quick:
        best = min(aligned, key=lambda x: times[x].total)
        raise ValueError(
            f"Eq. 5: receive, LoRA and send take {1e6 * times[best].total:.0f} us at best (ep="
            f"{best}), and the experts' budget is {1e6 * budget.ffn:.0f} us; use smaller batches "
            "(more instances) or a longer TPOT."
        )
    keeping_up = [x for x in quick if meets_throughput(times[x], instances.count, budget)]
    if not keeping_up:
        best = min(quick, key=lambda x: times[x].slowest)
        raise ValueError(
            f"Eq. 6: {instances.count} instances at {1e6 * times[best].slowest:.0f} us (ep={best}) "
            f"do not fit into the {1e6 * budget.layer:.0f} us of a layer; use fewer instances per "
            "LoRA Server or a longer TPOT."
        )
    return {x: times[x].total for x in keeping_up}
