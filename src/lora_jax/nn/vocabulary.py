"""Each row's own embedding and head, where its adapter brings rows of the vocabulary.

Trained tokens are looked up in a short list for each slot; their logits are LoRA products whose B
gives row j to logit j. Whole matrices are the groups of one grouped product.
"""

import jax.numpy as jnp

from lora_jax.adapters.slots import A_OFFSET, RANK, AdapterSlots
from lora_jax.adapters.task_head import head_width
from lora_jax.adapters.vocabulary import EMBEDDING, HEAD, PARTS, saved_name, tokens_name
from lora_jax.nn.lora import AdapterRouting
from lora_jax.ops.grouped_matmul import grouped_matmul
from lora_jax.ops.lora_gemm import lora_gemm
from lora_jax.ops.lora_gemm.batch import float_rows
from lora_jax.typing import Array, Bool, Float, Int


def own_embeddings(
    x: Float[Array, "rows hidden"],
    tokens: Int[Array, "rows"],
    routing: AdapterRouting,
    vocab: int,
) -> Float[Array, "rows hidden"]:
    """Return x, the base's embeddings, with the rows that adapters bring in their place.

    Other rows come back bit for bit; x itself where no adapter can bring any. `vocab` is the
    number of the base's tokens.
    """
    adapters = routing.adapters
    if adapters is None or not routing.brings:
        return x
    if saved_name(EMBEDDING) in routing.module_names:
        entries, has = _entries(saved_name(EMBEDDING), routing, adapters)
        matrices = _matrices(adapters, vocab, x.shape[1])
        rows = matrices[jnp.where(has, entries[:, A_OFFSET], 0), tokens]
        x = jnp.where(has[:, None], rows.astype(x.dtype), x)
    if tokens_name(EMBEDDING) in routing.module_names:
        entries, has = _entries(tokens_name(EMBEDDING), routing, adapters)
        hits = _token_ids(EMBEDDING, routing, adapters) == tokens[:, None]
        has &= hits.any(axis=1)
        at = jnp.where(has, entries[:, A_OFFSET] + jnp.argmax(hits, axis=1).astype(jnp.int32), 0)
        rows = float_rows(adapters.pools[str(x.shape[1])][at])
        x = jnp.where(has[:, None], rows.astype(x.dtype), x)
    return x


def own_logits(
    logits: Float[Array, "rows vocab"],
    states: Float[Array, "rows hidden"],
    routing: AdapterRouting,
) -> Float[Array, "rows vocab"]:
    """Return the base's logits, float32, with those of each row's own head in their place.

    Other rows come back bit for bit; `logits` itself where no adapter can bring any.
    """
    adapters = routing.adapters
    if adapters is None or not routing.brings:
        return logits
    if saved_name(HEAD) in routing.module_names:
        logits = _of_saved(logits, states, routing, adapters)
    if tokens_name(HEAD) in routing.module_names:
        logits = _of_tokens(logits, states, routing, adapters)
    return logits


def _of_saved(
    logits: Float[Array, "rows vocab"],
    states: Float[Array, "rows hidden"],
    routing: AdapterRouting,
    adapters: AdapterSlots,
) -> Float[Array, "rows vocab"]:
    """Return the logits, those of whole heads by one product with a group for each matrix."""
    entries, has = _entries(saved_name(HEAD), routing, adapters)
    matrices = _matrices(adapters, logits.shape[1], states.shape[1])
    count = matrices.shape[0]
    has &= jnp.arange(has.shape[0], dtype=jnp.int32) < routing.num_rows
    owner = jnp.where(has, entries[:, A_OFFSET], count)
    order = jnp.argsort(owner, stable=True)
    sizes = jnp.bincount(owner, length=count + 1)[:count].astype(jnp.int32)
    products = grouped_matmul(states[order], matrices, sizes)[jnp.argsort(order)]
    return jnp.where(has[:, None], products.astype(jnp.float32), logits)


def _of_tokens(
    logits: Float[Array, "rows vocab"],
    states: Float[Array, "rows hidden"],
    routing: AdapterRouting,
    adapters: AdapterSlots,
) -> Float[Array, "rows vocab"]:
    """Return the logits, those of trained tokens in the dtype of the base's."""
    name = tokens_name(HEAD)
    site, (_, has) = routing.module_names.index(name), _entries(name, routing, adapters)
    ids = _token_ids(HEAD, routing, adapters)
    tables = adapters.entries[site, 0], adapters.scaling[site, 0]
    width = head_width(ids.shape[1])
    zeros = jnp.zeros((states.shape[0], width), jnp.float32)
    rows, identity = adapters.pools[str(states.shape[1])], adapters.pools[str(width)]
    slots = jnp.where(has, routing.row_to_slot, -1)
    products = lora_gemm(zeros, states, rows, identity, *tables, slots, max_rank=width)
    products = products[:, : ids.shape[1]].astype(states.dtype).astype(jnp.float32)
    vocab = logits.shape[1]
    at = jnp.where(has[:, None] & (ids >= 0), ids, vocab)  # past the end: dropped
    row = jnp.arange(states.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[row, at].set(products, mode="drop")


def _entries(
    module: str, routing: AdapterRouting, adapters: AdapterSlots
) -> tuple[Int[Array, "rows 5"], Bool[Array, "rows"]]:
    """Return each row's entries of a module of layer 0, and whether its adapter has the module."""
    entries = adapters.entries[routing.module_names.index(module), 0]
    of_row = entries[jnp.maximum(routing.row_to_slot, 0)]
    return of_row, (routing.row_to_slot >= 0) & (of_row[:, RANK] > 0)


def _token_ids(
    part: str, routing: AdapterRouting, adapters: AdapterSlots
) -> Int[Array, "rows tokens"]:
    """Return the tokens of each row's slot, -1 behind them."""
    assert adapters.token_ids is not None
    return adapters.token_ids[PARTS.index(part), jnp.maximum(routing.row_to_slot, 0)]


def _matrices(
    adapters: AdapterSlots, vocab: int, hidden: int
) -> Float[Array, "matrices vocab hidden"]:
    """Return the whole embeddings and heads of all adapters, each of which is a row of a pool."""
    return adapters.pools[str(vocab * hidden)].reshape(-1, vocab, hidden)
