"""The next token of each logit row, and log-probabilities, on the device.

On a CPU rows are handled one after the other by a loop over the real rows. So a row pays only for
the processors that it uses (`lax.cond`), padding rows cost nothing, and the arithmetic of a row has
the same shape in every bucket: its result does not depend on its neighbours. Accelerators take all
rows at once, by the same functions: see batch_sampler.

Order of processors: min_tokens and logit bias, allowed tokens, bad words, penalties, then
temperature, min_p, top_k, top_p. Log-probabilities are of the raw logits, or of the masked ones
where a grammar binds the row, which comes before everything else. Top-k and top-p keep every token
that ties with the last one kept.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.ops.keep_likely.reference import keep_min_p, keep_top_k, keep_top_p
from lora_jax.ops.zeros import unsigned_zeros
from lora_jax.typing import Array, Bool, Float, Int
from serving.api.sampling import MAX_LOGPROBS
from serving.steps.device_state import Row, RowState, row_of
from serving.steps.sampling.token_masks import TokenMasks, mask_row

INVALID_TOKEN = -1  # the logits of the row are not finite numbers
NO_TOKEN = -2  # each token of the row is barred


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitRows:
    """Tokens of a step that yield logits, row by row; rows at or after num_rows are padding."""

    num_rows: Int[Array, ""]
    row_to_token: Int[Array, "rows"]
    row_to_seq: Int[Array, "rows"]
    row_to_slot: Int[Array, "rows"]  # LoRA slot; -1 is the base model
    positions: Int[Array, "rows"]  # of the token that the row chooses or scores
    targets: Int[Array, "rows"]  # token to score, or -1 to sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """Results by logit row, or of one row (leaves without the leading axis).

    Rows at or after num_rows, and log-probabilities that no one asked for, are zero.
    """

    token_ids: Int[Array, "*rows"]  # sampled, or the target; INVALID_TOKEN, NO_TOKEN: neither
    logprobs: Float[Array, "*rows"]  # of token_ids
    ranks: Int[Array, "*rows"]  # 1 + number of tokens that are more likely
    top_ids: Int[Array, "*rows top"]  # most likely first, the lower id first on a tie
    top_logprobs: Float[Array, "*rows top"]
    heads: Float[Array, "seqs width"] | None = None  # logits of task heads, by sequence row


def sample(
    logits: Float[Array, "rows vocab"],
    rows: LogitRows,
    state: RowState,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Return the token at `positions[r]` of sequence row_to_seq[r] for each r < num_rows.

    A target >= 0 is scored instead of sampling (log-probabilities of a prompt). Sampled rows take
    only tokens that their masks allow.
    """
    empty = no_samples(logits.shape[0], logits.shape[1])

    def body(i: Int[Array, ""], results: Sampled) -> Sampled:
        seq, target, row = rows.row_to_seq[i], rows.targets[i], logits[i]
        row = row if masks is None else mask_row(row, masks, i, target < 0)
        result = _sample_row(row, rows.positions[i], target, state, seq)
        return jax.tree.map(lambda all_, one: all_.at[i].set(one), results, result)

    return lax.fori_loop(jnp.int32(0), rows.num_rows, body, empty)


def no_samples(rows: int, vocab: int, zeros: Callable[..., jax.Array] = jnp.zeros) -> Sampled:
    """Return results of so many rows in which nothing was sampled; `zeros` makes the arrays."""
    top = min(MAX_LOGPROBS, vocab)
    return Sampled(
        token_ids=zeros(rows, jnp.int32),
        logprobs=zeros(rows, jnp.float32),
        ranks=zeros(rows, jnp.int32),
        top_ids=zeros((rows, top), jnp.int32),
        top_logprobs=zeros((rows, top), jnp.float32),
    )


# Inlined: each bucket's program has the same operations as ever, but one trace serves them all.
@functools.partial(jax.jit, inline=True)
def _sample_row(
    logits: Float[Array, "vocab"],
    position: Int[Array, ""],
    target: Int[Array, ""],
    state: RowState,
    seq: Int[Array, ""],
) -> Sampled:
    """Return the target (if >= 0) or the sampled token of one row, with logprobs if wanted."""
    token = lax.cond(target >= 0, lambda: target, lambda: _choose(logits, position, state, seq))
    wanted = (state.logprobs[seq] != 0) | (target >= 0)
    return lax.cond(wanted, lambda: score(logits, token), lambda: unscored(token, logits.shape[0]))


def score(
    logits: Float[Array, "vocab"],
    token: Int[Array, ""],
    top: Callable = lax.top_k,
    log_sum_exp: Callable = jax.nn.logsumexp,
) -> Sampled:
    """Return log_softmax(logits) at `token`, its rank, and the most likely tokens.

    `top` gives the k largest values and their ids, the lower id first on a tie, as lax.top_k does.
    """
    normalizer = log_sum_exp(logits)
    top_values, top_ids = top(unsigned_zeros(logits), min(MAX_LOGPROBS, logits.shape[0]))
    value = logits[jnp.maximum(token, 0)]
    better = jnp.sum((logits > value).astype(jnp.int32))
    return Sampled(token, value - normalizer, better + 1, top_ids, top_values - normalizer)


def unscored(token: Int[Array, ""], vocab: int) -> Sampled:
    """Return the token without scores."""
    top = min(MAX_LOGPROBS, vocab)
    zero = jnp.float32(0)
    return Sampled(
        token, zero, jnp.int32(0), jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32)
    )


def _choose(
    logits: Float[Array, "vocab"], position: Int[Array, ""], state: RowState, seq: Int[Array, ""]
) -> Int[Array, ""]:
    """Return the sampled token; the row is read inside the branches, so that unused parts stay."""

    def optional(
        used: Bool[Array, ""], change: Callable, values: Float[Array, "vocab"]
    ) -> Float[Array, "vocab"]:
        return lax.cond(used, lambda: change(values, position, row_of(state, seq)), lambda: values)

    edited = optional(state.edits[seq] != 0, apply_edits, logits)
    edited = optional(state.is_limited[seq] != 0, keep_allowed, edited)
    edited = optional(state.has_bad_words[seq] != 0, drop_bad_words, edited)
    edited = optional(state.penalties[seq] != 0, apply_penalties, edited)
    return lax.cond(
        state.temperature[seq] > 0,
        lambda: _draw(edited, position, row_of(state, seq)),
        lambda: argmax(edited),
    )


def apply_edits(
    logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Float[Array, "vocab"]:
    """Return logits + bias, with the suppressed ids at -inf while min_tokens is not reached."""
    logits = logits.at[row.bias_ids].add(row.bias_values, mode="drop")
    held = logits.at[row.suppressed_ids].set(-jnp.inf, mode="drop")
    return jnp.where(position - row.num_prompt < row.min_tokens, held, logits)


def keep_allowed(
    logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Float[Array, "vocab"]:
    """Return logits with all tokens but the row's allowed ones at -inf."""
    listed = jnp.zeros(logits.shape, jnp.int32).at[row.allowed_ids].max(1, mode="drop")
    return jnp.where(listed > 0, logits, -jnp.inf)


def drop_bad_words(
    logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Float[Array, "vocab"]:
    """Return logits with each token at -inf that would complete a bad word of sampled tokens."""
    start, last = row.bad_words[:, :-1], row.bad_words[:, -1]
    before = position - start.shape[1] + lax.iota(jnp.int32, start.shape[1])
    tokens = row.history[jnp.clip(before, 0, row.history.shape[0] - 1)]
    met = (start == tokens[None]) & (before >= row.num_prompt)[None]
    completes = jnp.all((start < 0) | met, axis=1) & (last >= 0)
    return logits.at[jnp.where(completes, last, logits.shape[0])].set(-jnp.inf, mode="drop")


def apply_penalties(
    logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Float[Array, "vocab"]:
    """Return penalised logits; c[v] counts v among the sampled tokens.

    Repetition divides positive and multiplies negative logits of every token seen in the prompt
    or the output; then frequency * c[v] and presence * [c[v] > 0] are subtracted.
    """
    positions = lax.iota(jnp.int32, row.history.shape[0])
    output = (positions >= row.num_prompt) & (positions < position)
    counts = jnp.zeros(logits.shape, jnp.int32).at[row.history].add(output.astype(jnp.int32))
    before = (positions < position).astype(jnp.int32)
    seen = jnp.zeros(logits.shape, jnp.int32).at[row.history].max(before)
    repeated = jnp.where(
        logits > 0, logits / row.repetition_penalty, logits * row.repetition_penalty
    )
    logits = jnp.where(seen > 0, repeated, logits)
    logits = logits - row.frequency_penalty * counts.astype(jnp.float32)
    return logits - row.presence_penalty * (counts > 0).astype(jnp.float32)


def _draw(logits: Float[Array, "vocab"], position: Int[Array, ""], row: Row) -> Int[Array, ""]:
    """Return argmax(kept logits / temperature + Gumbel noise of (seed, position))."""
    scaled = logits / row.temperature
    scaled = lax.cond(row.min_p > 0, lambda: keep_min_p(scaled, row.min_p), lambda: scaled)
    scaled = lax.cond(row.top_k > 0, lambda: keep_top_k(scaled, row.top_k), lambda: scaled)
    scaled = lax.cond(row.top_p < 1, lambda: keep_top_p(scaled, row.top_p), lambda: scaled)
    token = draw_scaled(scaled, position, row)
    return lax.cond(token < 0, lambda: why_none(argmax(logits)), lambda: token)


def draw_scaled(
    scaled: Float[Array, "vocab"], position: Int[Array, ""], row: Row
) -> Int[Array, ""]:
    """Return argmax(scaled + Gumbel noise of (seed, position)), INVALID_TOKEN if there is none."""
    key = jax.random.wrap_key_data(row.key, impl="threefry2x32")
    noise = jax.random.gumbel(jax.random.fold_in(key, position), scaled.shape, jnp.float32)
    finite = jnp.isfinite(jnp.max(scaled))
    return jnp.where(finite, argmax(scaled + noise), INVALID_TOKEN)


def argmax(values: Float[Array, "vocab"]) -> Int[Array, ""]:
    """Return the first index of the largest value.

    That is INVALID_TOKEN if a value is NaN or +inf, and NO_TOKEN if all are -inf. Two simple
    reductions: XLA's argmax on a CPU takes several times as long.
    """
    top = jnp.max(values)
    indices = lax.iota(jnp.int32, values.shape[0])
    first = jnp.min(jnp.where(values == top, indices, values.shape[0]))
    why = jnp.where(top == -jnp.inf, NO_TOKEN, INVALID_TOKEN)
    return jnp.where(jnp.isfinite(top), first, why)


def why_none(best: Int[Array, ""]) -> Int[Array, ""]:
    """Return why nothing could be drawn, by `argmax` of the logits that it was drawn from.

    What keeps the likely tokens leaves none where a logit is not finite, as if all were barred.
    """
    return jnp.minimum(best, INVALID_TOKEN)
