"""Writes new keys and values into the pages of a cache."""

from lora_jax.typing import Array, Float, Int


def write(
    pages: Float[Array, "pages page_size kv_heads dim"],
    new: Float[Array, "tokens kv_heads dim"],
    token_to_page_slot: Int[Array, "tokens"],
) -> Float[Array, "pages page_size kv_heads dim"]:
    """Return `pages` with new[t] at flat slot token_to_page_slot[t]; out of range is dropped."""
    flat = pages.reshape(-1, *pages.shape[2:])
    flat = flat.at[token_to_page_slot].set(new, mode="drop", unique_indices=True)
    return flat.reshape(pages.shape)
