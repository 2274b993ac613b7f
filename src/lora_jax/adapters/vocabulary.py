"""Rows of the vocabulary that adapters bring: trained tokens, whole embeddings and heads. No jax.

Of PEFT's `trainable_token_indices` an adapter has some rows [tokens, hidden], each in the place of
the base's; of `modules_to_save` it has a whole embedding or head [vocab, hidden]. Either is a site
of its own: trained tokens are rank rows of the hidden width, a whole matrix is one row of
vocab * hidden values. A head that is tied to the embedding follows it as PEFT has it: trained
tokens change both, a saved embedding changes the head only with `ensure_weight_tying`.
"""

import dataclasses

import numpy as np

from lora_jax.adapters.catalogue import WHOLE, LoraCatalogue, LoraModule
from lora_jax.adapters.task_head import head_width
from lora_jax.adapters.weights import TokenIds

PARTS = EMBEDDING, HEAD = "embed_tokens", "lm_head"  # order of AdapterSlots.token_ids
MOST_TOKENS = 1024
_TOKENS, _SAVED = ".tokens", ".saved"


def tokens_name(part: str) -> str:
    """Return the module of an embedding's or head's trained tokens."""
    return part + _TOKENS


def saved_name(part: str) -> str:
    """Return the module of a whole embedding or head."""
    return part + _SAVED


def is_saved(module: str) -> bool:
    """Return whether a module is a whole embedding or head."""
    return module.endswith(_SAVED)


def is_trained_embedding(module: str) -> bool:
    """Return whether a module is an embedding's trained tokens, whose A and B are the same rows."""
    return module == tokens_name(EMBEDDING)


def with_vocabulary(
    catalogue: LoraCatalogue, *, tied: bool, most_tokens: int, most_saved: int
) -> LoraCatalogue:
    """Return the catalogue with room for up to `most_tokens` trained tokens of each adapter.

    All adapters together may have `most_saved` whole embeddings and heads; a head is `tied` if it
    is the base's embedding.
    """
    hidden, vocab = catalogue.of_base[HEAD].d_in, catalogue.of_base[HEAD].d_out
    added = []
    if most_tokens:
        rank = {"layers": (0,), "split": WHOLE, "most_rank": most_tokens}
        width = head_width(most_tokens)
        added.append(LoraModule(tokens_name(EMBEDDING), hidden, hidden, **rank))
        added.append(LoraModule(tokens_name(HEAD), hidden, width, **rank))
    if most_saved:
        values = vocab * hidden
        names = map(saved_name, PARTS)
        added += [LoraModule(n, values, values, (0,), split=WHOLE, most_rank=1) for n in names]
    modules = catalogue.modules | {module.name: module for module in added}
    return dataclasses.replace(catalogue, modules=modules, tied_head=tied, most_saved=most_saved)


def ids_table(ids: TokenIds, most: int) -> np.ndarray:
    """Return int32 [2, most]: each part's tokens in the order of their rows, -1 behind them."""
    table = np.full((len(PARTS), most), -1, np.int32)
    for part, tokens in ids.items():
        table[PARTS.index(part), : len(tokens)] = tokens
    return table


def most_tokens(catalogue: LoraCatalogue) -> int:
    """Return how many trained tokens an adapter may have; 0 where there is no room for any."""
    module = catalogue.modules.get(tokens_name(EMBEDDING))
    return 0 if module is None else module.most_rank or 0


def brings_tokens(catalogue: LoraCatalogue) -> bool:
    """Return whether there is room for rows of the vocabulary that adapters bring."""
    return bool(most_tokens(catalogue) or catalogue.most_saved)
