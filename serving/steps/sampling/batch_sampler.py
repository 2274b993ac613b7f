"""The next token of all logit rows at once: what sampler does, for accelerators.

There a loop over rows costs the launches of every row. So all rows take the same branch, the
cheapest that serves the most demanding one; a row's own result is the same in each that serves it.
No branch holds a loop or a sort, so that XLA keeps the choice inside the step's CUDA graph.

The programs of a server trace a part once for each number of rows: see `in_layers`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.ops.keep_likely import keep_likely
from lora_jax.ops.lowered_once import in_layers
from lora_jax.typing import Array, Bool, Float, Int
from serving.steps.device_state import Row, RowState, rows_of
from serving.steps.sampling.sampler import (
    LogitRows,
    Sampled,
    apply_edits,
    apply_penalties,
    argmax,
    draw_scaled,
    drop_bad_words,
    keep_allowed,
    score,
    unscored,
    why_none,
)
from serving.steps.sampling.token_masks import TokenMasks, mask_rows

_PIECE = 1024  # tokens
_FOLD = 16  # numbers added by one elementwise pass


def sample(
    logits: Float[Array, "rows vocab"],
    rows: LogitRows,
    state: RowState,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Return what sampler.sample does."""
    live = jnp.arange(logits.shape[0], dtype=jnp.int32) < rows.num_rows
    seqs, targets = rows.row_to_seq, rows.targets
    if masks is not None:
        logits = mask_rows(logits, masks, live & (targets < 0))
    branches = [functools.partial(choose, state) for choose in (_greedy, _drawn, _kept, _edited)]
    need = _most_demanding(live & (targets < 0), seqs, state)
    tokens = lax.switch(need, branches, logits, rows.positions, seqs)
    tokens = jnp.where(live, jnp.where(targets >= 0, targets, tokens), 0)
    wanted = live & ((state.logprobs[seqs] != 0) | (targets >= 0))
    return lax.cond(jnp.any(wanted), _scored, _unscored, logits, tokens, wanted)


@in_layers
def _most_demanding(
    sampled: Bool[Array, "rows"], row_to_seq: Int[Array, "rows"], state: RowState
) -> Int[Array, ""]:
    """Return which branch serves all rows that are sampled."""

    def of_rows(name: str) -> Array:
        return getattr(state, name)[row_to_seq]

    random = sampled & (of_rows("temperature") > 0)
    kept = random & ((of_rows("min_p") > 0) | (of_rows("top_k") > 0) | (of_rows("top_p") < 1))
    edits = ("edits", "is_limited", "has_bad_words", "penalties")
    edited = sampled & functools.reduce(jnp.bitwise_or, [of_rows(name) != 0 for name in edits])
    need = random.astype(jnp.int32)
    need = jnp.where(edited, 3, jnp.where(kept, 2, need))
    return jnp.max(need)


@in_layers
def _greedy(
    state: RowState,
    logits: Float[Array, "rows vocab"],
    positions: Int[Array, "rows"],
    seqs: Int[Array, "rows"],
) -> Int[Array, "rows"]:
    return jax.vmap(argmax)(logits)


def _drawn(
    state: RowState,
    logits: Float[Array, "rows vocab"],
    positions: Int[Array, "rows"],
    seqs: Int[Array, "rows"],
) -> Int[Array, "rows"]:
    return _draw_rows(logits, _scaled(logits, state, seqs), positions, state, seqs)


def _kept(
    state: RowState,
    logits: Float[Array, "rows vocab"],
    positions: Int[Array, "rows"],
    seqs: Int[Array, "rows"],
) -> Int[Array, "rows"]:
    kept = keep_likely(
        _scaled(logits, state, seqs), state.min_p[seqs], state.top_k[seqs], state.top_p[seqs]
    )
    return _draw_rows(logits, kept, positions, state, seqs)


def _edited(
    state: RowState,
    logits: Float[Array, "rows vocab"],
    positions: Int[Array, "rows"],
    seqs: Int[Array, "rows"],
) -> Int[Array, "rows"]:
    return _kept(state, _edited_logits(logits, positions, state, seqs), positions, seqs)


@in_layers
def _edited_logits(
    logits: Float[Array, "rows vocab"],
    positions: Int[Array, "rows"],
    state: RowState,
    seqs: Int[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    rows = rows_of(state, seqs)
    written = jnp.any((rows.edits | rows.is_limited | rows.has_bad_words) != 0)
    # Each of them copies all logits, penalties do not.
    edited = lax.cond(written, jax.vmap(_edit), lambda *given: given[0], logits, positions, rows)
    return jax.vmap(_penalise)(edited, positions, rows)


def _edit(
    logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Float[Array, "vocab"]:
    """Return the logits of a row with its edits, limits and bad words."""
    logits = jnp.where(row.edits != 0, apply_edits(logits, position, row), logits)
    logits = jnp.where(row.is_limited != 0, keep_allowed(logits, position, row), logits)
    return jnp.where(row.has_bad_words != 0, drop_bad_words(logits, position, row), logits)


def _penalise(
    logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Float[Array, "vocab"]:
    return jnp.where(row.penalties != 0, apply_penalties(logits, position, row), logits)


@in_layers
def _draw_rows(
    logits: Float[Array, "rows vocab"],
    kept: Float[Array, "rows vocab"],
    positions: Int[Array, "rows"],
    state: RowState,
    seqs: Int[Array, "rows"],
) -> Int[Array, "rows"]:
    return jax.vmap(_draw)(logits, kept, positions, rows_of(state, seqs, ("key", "temperature")))


def _draw(
    logits: Float[Array, "vocab"],
    kept: Float[Array, "vocab"],
    position: Int[Array, ""],
    row: Row,
) -> Int[Array, ""]:
    """Return a token drawn from the kept ones, or the most likely one of a greedy row."""
    best, drawn = argmax(logits), draw_scaled(kept, position, row)
    drawn = jnp.where(drawn < 0, why_none(best), drawn)
    return jnp.where(row.temperature > 0, drawn, best)


@in_layers
def _scaled(
    logits: Float[Array, "rows vocab"], state: RowState, seqs: Int[Array, "rows"]
) -> Float[Array, "rows vocab"]:
    """Return logits / temperature; a greedy row's, which no one reads, are the logits."""
    temperature = state.temperature[seqs]
    return logits / jnp.where(temperature > 0, temperature, jnp.float32(1))[:, None]


@in_layers
def _scored(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"], wanted: Bool[Array, "rows"]
) -> Sampled:
    """Return scores of the rows that want them, zeros for others."""

    def one(
        logits: Float[Array, "vocab"], token: Int[Array, ""], wanted: Bool[Array, ""]
    ) -> Sampled:
        none = unscored(token, logits.shape[0])
        scored = score(logits, token, top_of_pieces, log_sum_exp)
        return jax.tree.map(lambda a, b: jnp.where(wanted, a, b), scored, none)

    return jax.vmap(one)(logits, tokens, wanted)


def log_sum_exp(logits: Float[Array, "vocab"]) -> Float[Array, ""]:
    """Return what jax.nn.logsumexp does, in one order of sums whatever stands around the row.

    XLA orders a reduction by the shape of the whole array and by what it is fused with.
    """
    most = lax.optimization_barrier(jnp.max(logits))
    parts = jnp.exp(logits - most)
    while (size := parts.shape[0]) > 1:
        rest = -(-size // _FOLD)
        parts = lax.optimization_barrier(jnp.pad(parts, (0, rest * _FOLD - size)))
        parts = functools.reduce(jnp.add, list(parts.reshape(_FOLD, rest)))
    return most + jnp.log(parts[0])


def top_of_pieces(
    logits: Float[Array, "vocab"], k: int
) -> tuple[Float[Array, "k"], Int[Array, "k"]]:
    """Return what lax.top_k does: the best of each piece of the vocabulary, and the best of those.

    Pieces are so short that a GPU sorts them in a kernel; a longer sort is a library's call there,
    which no graph can hold.
    """
    size = logits.shape[0]
    pieces = -(-size // _PIECE)
    cut = jnp.pad(logits, (0, pieces * _PIECE - size), constant_values=-jnp.inf)
    values, places = lax.top_k(cut.reshape(pieces, _PIECE), min(k, _PIECE))
    ids = places + jnp.arange(pieces, dtype=places.dtype)[:, None] * _PIECE
    best, at = lax.top_k(values.reshape(-1), k)
    return best, ids.reshape(-1)[at]


@in_layers
def _unscored(
    logits: Float[Array, "rows vocab"], tokens: Int[Array, "rows"], wanted: Bool[Array, "rows"]
) -> Sampled:
    return jax.vmap(functools.partial(unscored, vocab=logits.shape[1]))(tokens)
