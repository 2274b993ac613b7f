"""The next token of all logit rows at once: what sampler does, for accelerators.

There a loop over rows costs the launches of every row. So all rows take the same branch, the
cheapest that serves the most demanding one; a row's own result is the same in each that serves it.
No branch holds a loop or a sort, so that XLA keeps the choice inside the step's CUDA graph.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.typing import Array, Bool, Float, Int
from serving.device_state import RowState, row_of
from serving.sampler import (
    Sampled,
    apply_edits,
    apply_penalties,
    argmax,
    draw_scaled,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    score,
    unscored,
)


def sample(
    logits: Float[Array, "rows vocab"],
    num_rows: Int[Array, ""],
    row_to_seq: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    targets: Int[Array, "rows"],
    state: RowState,
) -> Sampled:
    """Return what sampler.sample does."""
    live = jnp.arange(logits.shape[0], dtype=jnp.int32) < num_rows
    branches = [
        jax.vmap(functools.partial(choose, state)) for choose in (_greedy, _drawn, _kept, _edited)
    ]
    need = _most_demanding(live & (targets < 0), row_to_seq, state)
    tokens = lax.switch(need, branches, logits, positions, row_to_seq)
    tokens = jnp.where(live, jnp.where(targets >= 0, targets, tokens), 0)
    wanted = live & ((state.logprobs[row_to_seq] != 0) | (targets >= 0))
    return lax.cond(jnp.any(wanted), _scored, _unscored, logits, tokens, wanted)


def sample_plain(
    logits: Float[Array, "rows vocab"],
    num_rows: Int[Array, ""],
    row_to_seq: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    targets: Int[Array, "rows"],
    state: RowState,
) -> Sampled:
    """Return what `sample` does for rows that all take the most likely token, without scores."""
    live = jnp.arange(logits.shape[0], dtype=jnp.int32) < num_rows
    tokens = jnp.where(live, jax.vmap(argmax)(logits), 0)
    return _unscored(logits, tokens, live)


def _most_demanding(
    sampled: Bool[Array, "rows"], row_to_seq: Int[Array, "rows"], state: RowState
) -> Int[Array, ""]:
    """Return which branch serves all rows that are sampled."""

    def of_rows(name: str) -> Array:
        return getattr(state, name)[row_to_seq]

    random = sampled & (of_rows("temperature") > 0)
    kept = random & ((of_rows("min_p") > 0) | (of_rows("top_k") > 0) | (of_rows("top_p") < 1))
    edited = sampled & ((of_rows("edits") != 0) | (of_rows("penalties") != 0))
    need = random.astype(jnp.int32)
    need = jnp.where(edited, 3, jnp.where(kept, 2, need))
    return jnp.max(need)


def _greedy(
    state: RowState, logits: Float[Array, "vocab"], position: Int[Array, ""], seq: Int[Array, ""]
) -> Int[Array, ""]:
    return argmax(logits)


def _drawn(
    state: RowState, logits: Float[Array, "vocab"], position: Int[Array, ""], seq: Int[Array, ""]
) -> Int[Array, ""]:
    row = row_of(state, seq)
    drawn = draw_scaled(_scaled(logits, row), position, row)
    return jnp.where(row.temperature > 0, drawn, argmax(logits))


def _kept(
    state: RowState, logits: Float[Array, "vocab"], position: Int[Array, ""], seq: Int[Array, ""]
) -> Int[Array, ""]:
    row = row_of(state, seq)
    scaled = _scaled(logits, row)
    scaled = jnp.where(row.min_p > 0, keep_min_p(scaled, row.min_p), scaled)
    scaled = jnp.where(row.top_k > 0, keep_top_k(scaled, row.top_k, unroll=True), scaled)
    scaled = jnp.where(row.top_p < 1, keep_top_p(scaled, row.top_p, unroll=True), scaled)
    drawn = draw_scaled(scaled, position, row)
    return jnp.where(row.temperature > 0, drawn, argmax(logits))


def _edited(
    state: RowState, logits: Float[Array, "vocab"], position: Int[Array, ""], seq: Int[Array, ""]
) -> Int[Array, ""]:
    row = row_of(state, seq)
    logits = jnp.where(row.edits != 0, apply_edits(logits, position, row), logits)
    logits = jnp.where(row.penalties != 0, apply_penalties(logits, position, row), logits)
    return _kept(state, logits, position, seq)


def _scaled(logits: Float[Array, "vocab"], row: RowState) -> Float[Array, "vocab"]:
    """Return logits / temperature; a greedy row's, which no one reads, are the logits."""
    return logits / jnp.where(row.temperature > 0, row.temperature, jnp.float32(1))


def _scored(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"], wanted: Bool[Array, "rows"]
) -> Sampled:
    """Return scores of the rows that want them, zeros for others."""

    def one(
        logits: Float[Array, "vocab"], token: Int[Array, ""], wanted: Bool[Array, ""]
    ) -> Sampled:
        none = unscored(token, logits.shape[0])
        scored = score(logits, token, top_by_rounds)
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), scored, none)

    return jax.vmap(one)(logits, tokens, wanted)


def top_by_rounds(
    logits: Float[Array, "vocab"], k: int
) -> tuple[Float[Array, "k"], Int[Array, "k"]]:
    """Return what lax.top_k does for numbers that are finite or -inf, one largest at a time.

    A sort of the vocabulary is a library's call on a GPU, which no graph can hold.
    """
    place = lax.iota(jnp.int32, logits.shape[0])
    taken, values, ids = jnp.zeros(logits.shape, bool), [], []
    for _ in range(k):
        left = jnp.where(taken, -jnp.inf, logits)
        value = jnp.max(left)
        first = jnp.min(jnp.where((left == value) & ~taken, place, logits.shape[0] - 1))
        values.append(value)
        ids.append(first)
        taken = taken | (place == first)
    return jnp.stack(values), jnp.stack(ids)


def _unscored(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"], wanted: Bool[Array, "rows"]
) -> Sampled:
    return jax.vmap(functools.partial(unscored, vocab=logits.shape[1]))(tokens)
