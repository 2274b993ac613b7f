"""Sizes of adapter slots: rank rows of each width, of one adapter and of all. No jax."""

import dataclasses

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.gains import is_gain
from lora_jax.adapters.task_head import SCORE
from lora_jax.adapters.vocabulary import is_saved, is_trained_embedding
from lora_jax.rank_rows import rows_nbytes


@dataclasses.dataclass(frozen=True)
class SlotsSpec:
    """Sizes of the slots: how many adapters, and how many rank rows of each width."""

    num_slots: int
    rows: dict[int, int]


def rows_per_adapter(catalogue: LoraCatalogue, rank: int) -> dict[int, int]:
    """Return the rank rows of each width that one adapter of `rank` on every site takes."""
    rows = dict.fromkeys(catalogue.widths, 0)
    for module in catalogue.modules.values():
        if is_saved(module.name):  # few adapters have one: saved_rows
            continue
        count = len(module.layers) * (module.most_rank or rank)
        a_count, b_count = (count * max(module.num_experts, 1),) * 2
        if module.name == SCORE:  # its bias is one more row of B
            b_count += 1
        if is_gain(module.name) or is_trained_embedding(module.name):  # A and B are the same rows
            a_count, b_count = count, 0
        elif module.name == "kv_b_proj.k":  # its B is the A that kv_b_proj.v counts below
            b_count = 0
        elif module.name == "kv_b_proj.v":  # one A for all heads
            a_count = count
        rows[module.d_in] += a_count
        rows[module.d_out] += b_count
    return rows


def saved_rows(catalogue: LoraCatalogue) -> dict[int, int]:
    """Return the rows of whole embeddings and heads, which all adapters share."""
    widths = {module.d_in for module in catalogue.modules.values() if is_saved(module.name)}
    return dict.fromkeys(widths, catalogue.most_saved)


def size_slots(
    catalogue: LoraCatalogue,
    num_slots: int,
    max_rank: int,
    itemsize: int,
    byte_budget: int | None = None,
) -> SlotsSpec:
    """Return pools that hold `num_slots` adapters of `max_rank` on every site.

    Whole embeddings and heads have their rows beside that, as saved_rows says. With a `byte_budget`
    for all other pools there are fewer rows. Where that suffices the experts' alone
    shrink, so that adapters of attention, which are many times smaller, still fill every slot;
    else all shrink evenly. ValueError when not even one adapter of `max_rank` on every site would
    fit.
    """
    if num_slots < 1 or max_rank < 1:
        raise ValueError(f"Need at least 1 slot and rank 1, not {num_slots} and {max_rank}.")
    one = rows_per_adapter(catalogue, max_rank)
    one_bytes = rows_nbytes(one, itemsize)
    saved = saved_rows(catalogue)
    if byte_budget is None or byte_budget >= num_slots * one_bytes:
        rows = {width: num_slots * count for width, count in one.items()}
        return SlotsSpec(num_slots, rows | saved)
    if byte_budget < one_bytes:
        raise ValueError(
            f"One adapter of rank {max_rank} on every module takes {one_bytes} bytes; the budget "
            f"for adapters is {byte_budget}. Give them more, or lower the largest rank."
        )
    dense = rows_per_adapter(catalogue.without_experts(), max_rank)
    experts = {width: count - dense.get(width, 0) for width, count in one.items()}
    expert_bytes = rows_nbytes(experts, itemsize)
    left = byte_budget - num_slots * rows_nbytes(dense, itemsize)
    if not 0 < expert_bytes <= left:
        rows = {width: count * byte_budget // one_bytes for width, count in one.items()}
    else:
        whole = {width: num_slots * dense.get(width, 0) for width in one}
        rows = {w: whole[w] + count * left // expert_bytes for w, count in experts.items()}
    return SlotsSpec(num_slots, rows | saved)
