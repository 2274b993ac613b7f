"""The argument of every implementation of attention over pages."""

import dataclasses

import jax

from lora_jax.typing import Array, Float, Int, Num


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedAttentionArgs:
    """Queries of a flat list of tokens, the pages of their sequences, and the softmax's options.

    `v_pages` None: V is the first v_dim of K (MLA's latent). Tokens from num_tokens on are padding.
    """

    q: Float[Array, "tokens q_heads k_dim"]
    k_pages: Num[Array, "pages page_size kv_heads k_items"]
    v_pages: Num[Array, "pages page_size kv_heads v_items"] | None
    block_tables: Int[Array, "seqs max_pages"]
    token_to_seq: Int[Array, "tokens"]
    positions: Int[Array, "tokens"]
    num_tokens: Int[Array, ""]
    sinks: Float[Array, "q_heads"] | None
    scale: float = dataclasses.field(metadata={"static": True})
    v_dim: int = dataclasses.field(metadata={"static": True})
    sliding_window: int | None = dataclasses.field(metadata={"static": True})
