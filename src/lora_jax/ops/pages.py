"""Writes new keys and values into the pages of a cache."""

from lora_jax.ops.kv_rows import CODED, coded
from lora_jax.typing import Array, Float, Int, Num


def write(
    pages: Num[Array, "pages page_size kv_heads items"],
    new: Float[Array, "tokens kv_heads dim"],
    token_to_page_slot: Int[Array, "tokens"],
) -> Num[Array, "pages page_size kv_heads items"]:
    """Return `pages` with new[t] at flat slot token_to_page_slot[t]; out of range is dropped.

    Pages in 8 bits take them as such rows (ops.kv_rows).
    """
    if pages.dtype == CODED:
        new = coded(new)
    flat = pages.reshape(-1, *pages.shape[2:])
    flat = flat.at[token_to_page_slot].set(new, mode="drop", unique_indices=True)
    return flat.reshape(pages.shape)
