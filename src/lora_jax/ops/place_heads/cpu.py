"""Heads to pages that the program does not own, on a CPU: turned by XLA, written by C++."""

import jax.numpy as jnp

from lora_jax.ops.pages import write_in_place
from lora_jax.ops.place_heads.args import PlaceHeadsArgs
from lora_jax.ops.place_heads.xla import turned
from lora_jax.typing import Array


def place_heads(args: PlaceHeadsArgs) -> tuple[Array, Array, Array]:
    """Same result as the reference, the pages being the argument's own."""
    q, k = turned(args)
    pages = args.k_pages, args.v_pages
    q = write_in_place(q, pages[0], k, pages[1], jnp.asarray(args.v), args.token_to_page_slot)
    return q, *pages
