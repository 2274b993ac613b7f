"""Task heads of many adapters on the states of one step, by the grouped LoRA product.

W h is the shrink of LoRA with a rank row per label, so that heads are rank rows like all others:
the same pools, the same loads, the same kernels. B gives row j to logit j.
"""

import jax.numpy as jnp

from lora_jax.adapters.slots import B_OFFSET, RANK, AdapterSlots
from lora_jax.adapters.task_head import SCORE
from lora_jax.ops.lora_gemm import lora_gemm
from lora_jax.ops.lora_gemm.batch import float_rows
from lora_jax.typing import Array, Float, Int


def head_logits(
    states: Float[Array, "rows hidden"],
    row_to_slot: Int[Array, "rows"],
    adapters: AdapterSlots,
    module_names: tuple[str, ...],
    width: int,
) -> Float[Array, "rows width"]:
    """Return float32 W h + bias of each row's head, 0 past its labels and for rows of slot -1.

    Every row's slot has a head. A row's bits depend on its own state and head only.
    """
    site = module_names.index(SCORE)
    entries, scaling = adapters.entries[site, 0], adapters.scaling[site, 0]
    pool = adapters.pools[str(width)]
    of_slot = entries[jnp.maximum(row_to_slot, 0)]
    bias = float_rows(pool[of_slot[:, B_OFFSET] + of_slot[:, RANK]])
    bias = jnp.where((row_to_slot >= 0)[:, None], bias, jnp.float32(0))
    rows = adapters.pools[str(states.shape[1])]
    return lora_gemm(bias, states, rows, pool, entries, scaling, row_to_slot, max_rank=width)
