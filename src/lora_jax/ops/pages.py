"""Writes new keys and values into the pages of a cache: into a new value of it, or in place.

Pages that the step does not own are written in place (see lora_jax.pooled): XLA is given them
as arguments that nobody changes, so the order of writes and reads is that of an array that goes
through the write.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.acting_call import acting_call
from lora_jax.ops.cpu import build
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


def write_in_place(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pages: Num[Array, "pages page_size kv_heads k_items"],
    k: Float[Array, "tokens kv_heads k_dim"],
    v_pages: Num[Array, "pages page_size kv_heads v_items"] | None,
    v: Float[Array, "tokens kv_heads v_dim"] | None,
    token_to_page_slot: Int[Array, "tokens"],
) -> Float[Array, "tokens q_heads head_dim"]:
    """Write k[t] and v[t] to flat slot token_to_page_slot[t] of pages; return q as it is.

    Whatever reads the pages must take this q, or it may run before the writes. On a CPU alone.

    Raises:
        Declined: another device, or no C++ kernels.
    """
    build.require()
    if v_pages is None or v is None:
        v_pages, v = jnp.zeros((0, 0, 0, 0), k_pages.dtype), jnp.zeros((0,), k.dtype)
    k, v = (coded(new) if k_pages.dtype == CODED and new.size else new for new in (k, v))
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    call = acting_call("lora_jax_write_pages", out, input_output_aliases={0: 0})
    return call(q, k_pages, k, v_pages, v, token_to_page_slot)
