"""Inputs of one step: a flat list of tokens that belong to several sequences.

Prefill chunks and decode tokens ride together. `max_seqs` sequence rows exist for the whole life
of a model runner; a running sequence owns one row, which names its block table.
"""

import dataclasses

import jax

from lora_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ImageRows:
    """Images of one step: the rows a tower made of them, and which token takes which.

    A row holds what stands for the token's embedding, and then what is added to the hidden state
    after each of the first layers (deepstack).
    """

    rows: Float[Array, "encoder_rows parts hidden"]
    token_to_row: Int[Array, "tokens"]  # -1: a text token, which takes its embedding
    rope_positions: Int[Array, "3 tokens"]  # time, row and column of M-RoPE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReadRows:
    """Tokens of one step whose final state is read; of the others the last layer makes K and V."""

    row_to_token: Int[Array, "read"]
    num_rows: Int[Array, ""]  # rows at or after it are padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ForwardBatch:
    """Device integers of one step. Entries at or after `num_tokens` are padding.

    Padding carries position 0, sequence row 0, page slot out of range (writes are dropped) and
    adapter slots -1; every op skips it, so that a bucket costs what its real tokens cost. The two
    fields of ESFT go together; without them no trace of ESFT is in the program, without `images`
    none of images, and without `token_to_surplus_slot` none of a mixture.
    """

    tokens: Int[Array, "tokens"]  # token ids
    positions: Int[Array, "tokens"]  # 0-based position in the sequence
    token_to_seq: Int[Array, "tokens"]  # row of block_tables
    token_to_slot: Int[Array, "tokens"]  # LoRA slot; -1 is the base model
    token_to_page_slot: Int[Array, "tokens"]  # page * page_size + offset, where K and V go
    block_tables: Int[Array, "seqs max_pages"]  # pages of a sequence in order
    num_tokens: Int[Array, ""]
    token_to_esft_slot: Int[Array, "tokens"] | None = None  # row of the tables; -1: base's experts
    reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None = None  # see ops.reroute
    images: ImageRows | None = None
    # In a mixture: the adapter that a token's weights have too much; -1 where they have the right.
    token_to_surplus_slot: Int[Array, "tokens"] | None = None
