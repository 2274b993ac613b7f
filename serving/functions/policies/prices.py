"""Costs of functions and of engines that are always on, at published prices.

Source: Alibaba Function Compute, as ServerlessLoRA uses it (section 5.1): one compute unit (CU) is
$0.00002. A GPU's GB-second is 1.5 CU while a request runs and 0.25 while artifacts are only kept;
table 1's engines that are always on are their GPU GB for 4 hours at the active rate, $0.432 per GB.
"""

import dataclasses
from collections.abc import Mapping, Sequence

DOLLARS_PER_CU = 0.00002


@dataclasses.dataclass(frozen=True)
class Rates:
    """Compute units per second and unit, and per 10,000 calls."""

    gpu_gb_active: float = 1.5
    gpu_gb_idle: float = 0.25
    vcpu_active: float = 1.0
    memory_gb: float = 0.15
    calls_10_000: float = 75.0


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources that were held, in GB-seconds, vCPU-seconds and calls. Idle vCPUs are free."""

    gpu_gb_active_s: float = 0.0
    gpu_gb_idle_s: float = 0.0
    vcpu_active_s: float = 0.0
    memory_gb_s: float = 0.0
    calls: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Usage(*(a + b for a, b in zip(ours, theirs, strict=True)))


def dollars(usage: Usage, rates: Rates | None = None) -> float:
    """Return the price of what was held."""
    rates = rates or Rates()
    units = (
        usage.gpu_gb_active_s * rates.gpu_gb_active
        + usage.gpu_gb_idle_s * rates.gpu_gb_idle
        + usage.vcpu_active_s * rates.vcpu_active
        + usage.memory_gb_s * rates.memory_gb
        + usage.calls / 10_000 * rates.calls_10_000
    )
    return units * DOLLARS_PER_CU


def always_on(gpu_gb: float, seconds: float) -> Usage:
    """Return the usage of an engine that holds its GPU memory all the time."""
    return Usage(gpu_gb_active_s=gpu_gb * seconds)


@dataclasses.dataclass(frozen=True)
class Shares:
    """A backbone's GB-seconds: by function while requests ran, and the rest, while none did."""

    active: Mapping[str, float]
    idle: float


def share_backbone(
    gpu_gb: float, resident: tuple[float, float], busy: Mapping[str, Sequence[tuple[float, float]]]
) -> Shares:
    """Return how a shared backbone's memory is divided among its functions.

    At a moment at which k functions run a request, each pays for 1/k of the bytes; while none runs
    the bytes are nobody's, which is the operator's to pay.

    Args:
        gpu_gb: size of the backbone.
        resident: from when to when it lay on the device, in seconds.
        busy: by function, spans within `resident` in which a request ran; spans of one function
            do not overlap.

    Raises ValueError for a span that is outside of `resident` or ends before it begins.
    """
    begin, end = resident
    for name, spans in busy.items():
        for start, stop in spans:
            if not begin <= start <= stop <= end:
                raise ValueError(f"{name}: span {start}..{stop} is not within {begin}..{end}.")
    events = sorted(
        event
        for name, spans in busy.items()
        for start, stop in spans
        for event in ((start, 1, name), (stop, 0, name))
    )
    active, idle = dict.fromkeys(busy, 0.0), 0.0
    running: set[str] = set()
    reached = begin
    for moment, starts, name in [*events, (end, 0, None)]:
        held = (moment - reached) * gpu_gb
        for other in running:
            active[other] += held / len(running)
        idle += 0.0 if running else held
        reached = moment
        if name is not None:
            (running.add if starts else running.discard)(name)
    return Shares(active, idle)


def cost_effectiveness(mean_e2e_s: float, cost: float) -> float:
    """Return 1 / (mean end-to-end seconds x dollars), the paper's measure; larger is better.

    Raises ValueError unless both are above 0.
    """
    if mean_e2e_s <= 0 or cost <= 0:
        raise ValueError(f"latency and cost must be above 0, got {mean_e2e_s} s, ${cost}.")
    return 1 / (mean_e2e_s * cost)


def published_bill(mean_e2e_s: float, sharing: int) -> float:
    """Return what a serverless system costs by table 1's own figures, in an arbitrary unit.

    Each of the table's 18 costs of serverless systems is the mean end-to-end latency of its row
    times one number of its workload and backbone, over the functions that share a backbone: 4 for
    ServerlessLoRA, 1 for the others (within 0.4%). Neither residency nor batches enter.
    """
    return mean_e2e_s / sharing
