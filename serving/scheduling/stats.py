"""Statistics of the scheduler's sequences. No jax."""

import dataclasses
from collections.abc import Iterable

from serving.api.images import ImageStats
from serving.api.request import Sequence


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """Positions of the sequences now; counters count from the start."""

    num_running: int
    num_waiting_capacity: int  # for a row, pages or tokens
    num_waiting_adapter: int  # for an adapter slot
    running_adapters: tuple[str, ...]  # names, sorted
    waiting_adapters: tuple[str, ...]
    kv_usage: float  # 0 to 1
    num_preemptions: int
    prefix_queries: int  # tokens
    prefix_hits: int  # tokens
    images: ImageStats = dataclasses.field(default_factory=ImageStats)


def adapter_names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Return the names of the sequences' adapters, sorted."""
    return tuple(sorted({s.request.adapter for s in sequences if s.request.adapter}))
