"""Statistics of the scheduler's sequences. No jax."""

import dataclasses
from collections.abc import Iterable

from serving.api.images import ImageStats
from serving.api.request import Sequence
from serving.scheduling.adapter_gate import AdapterGate
from serving.scheduling.pages.exchange import PoolShares
from serving.scheduling.pages.host_pages import HostPageStats
from serving.scheduling.pages.sequence_pages import SequencePages
from serving.scheduling.running_line import RunningLine
from serving.scheduling.waiting_line import WaitingLine


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
    host_pages: HostPageStats = dataclasses.field(default_factory=HostPageStats)
    pool: PoolShares = dataclasses.field(default_factory=PoolShares)


def adapter_names(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    """Return the names of the sequences' adapters, sorted."""
    return tuple(sorted({s.request.adapter for s in sequences if s.request.adapter}))


def scheduler_stats(
    running: RunningLine,
    waiting: WaitingLine,
    gate: AdapterGate,
    pages: SequencePages,
    num_preemptions: int,
) -> SchedulerStats:
    """Return where the scheduler's sequences are."""
    on_adapter = [s for s in waiting if gate.is_waiting(s)]
    prefix = pages.stats
    return SchedulerStats(
        num_running=len(running),
        num_waiting_capacity=len(waiting) - len(on_adapter),
        num_waiting_adapter=len(on_adapter),
        running_adapters=adapter_names(running),
        waiting_adapters=adapter_names(waiting),
        kv_usage=pages.usage,
        num_preemptions=num_preemptions,
        prefix_queries=prefix.queries,
        prefix_hits=prefix.hits,
        images=pages.image_stats,
        host_pages=pages.host_stats,
        pool=pages.pool_shares,
    )
