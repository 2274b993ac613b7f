"""Parts of an engine that hold adapters on the device: slots, copier and residencies."""

import dataclasses
from collections.abc import Callable, Set

from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.host_table import HostTable
from lora_jax.adapters.slots import SlotsSpec
from serving.api.config import EngineConfig
from serving.engine.memory.memory_budget import make_allocator
from serving.engine.memory.storage import host_form
from serving.engine.parts.loaded_base import LoadedBase
from serving.engine.parts.over_hosts import shared, teller
from serving.loading.residencies import Residencies, make_residencies
from serving.runtime.device_copier import engine_copier
from serving.runtime.gang import Gang


@dataclasses.dataclass(frozen=True, eq=False)
class SlotParts:
    """Sizes of the slots, and the parts that put adapters into them."""

    spec: SlotsSpec
    bringing: Set[int]  # slots whose adapters have more than LoRA, kept up to date
    copies_rows: bool  # a copier writes rank rows; else programs do
    residencies: Residencies


def make_slots(
    config: EngineConfig,
    base: LoadedBase,
    gang: Gang | None,
    on_loaded: Callable[[float], None],
) -> SlotParts:
    """Return slots within the memory budget; `on_loaded` is told the seconds of each load."""
    if base.pool is not None:
        allocator, spec = base.pool.allocator, base.pool.spec
    else:
        allocator, spec = make_allocator(
            config,
            base.catalogue,
            base.local_catalogue,
            base.dtype,
            base.num_full_adapters,
            share=base.lora_share,
            rank=base.usual_rank,
            step=base.size.step_bytes,
        )
    spec = shared(gang, spec)
    copier = engine_copier(is_pooled=base.pool is not None) if base.split is None else None
    by_host = isinstance(copier, HostCopier)
    # The host keeps what a device's memory takes; its own copier converts as it copies.
    copied_as = None if copier is None or by_host else base.dtype
    # Merges and towers are programs that read slots and are no steps.
    has_table = by_host and base.merged is None and base.images is None
    residencies = make_residencies(
        allocator,
        base.esft,
        base.remote,
        copier=copier,
        host_form=host_form(config, base.catalogue, base.widths, base.norms, copied_as=copied_as),
        on_loaded=on_loaded,
        tell=teller(gang),
        room=None if base.pool is None else base.pool.room,
        table=HostTable() if has_table else None,
    )
    return SlotParts(spec, allocator.bringing, copier is not None, residencies)
