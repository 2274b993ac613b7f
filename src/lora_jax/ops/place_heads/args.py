"""The argument of every implementation of place_heads."""

import dataclasses

import jax

from lora_jax.typing import Array, Float, Int, Num


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlaceHeadsArgs:
    """New heads of a flat list of tokens, their angles, and the pages that k and v go to.

    `scales` are the weights of the norms that each head of q and of k goes through first, if any.
    Tokens whose page slot is out of range are dropped. With `num_tokens` q of later tokens may be 0
    instead. Pages may be in 8 bits (ops.kv_rows). With `in_place` the pages are written where they
    lie, though the program does not own them.
    """

    q: Float[Array, "tokens q_heads head_dim"]
    k: Float[Array, "tokens kv_heads head_dim"]
    v: Float[Array, "tokens kv_heads head_dim"]
    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]
    scales: tuple[Float[Array, "head_dim"], Float[Array, "head_dim"]] | None
    k_pages: Num[Array, "pages page_size kv_heads items"]
    v_pages: Num[Array, "pages page_size kv_heads items"]
    token_to_page_slot: Int[Array, "tokens"]
    eps: float = dataclasses.field(default=0.0, metadata={"static": True})  # of the norms
    in_place: bool = dataclasses.field(default=False, metadata={"static": True})
    num_tokens: Int[Array, ""] | None = None
