"""Device state of the running sequences: tokens and sampling parameters.

A running sequence owns one row. The row is written once when the sequence is admitted; after that
the step itself appends the sampled tokens, so that neither tokens nor parameters travel from the
host again. Every input token of a step is read from `history`.
"""

import dataclasses
import functools
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Float, Int, UInt32
from serving.api.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Sampling,
)

# Ids held back before min_tokens: the request's stop ids and the model's own.
MAX_SUPPRESSED = MAX_STOP_TOKEN_IDS + 64
MAX_BAD_FORMS = 2 * MAX_BAD_WORDS  # each word at the start of a text and within one
_INT_SCALARS = (
    "seed",
    "num_prompt",
    "min_tokens",
    "top_k",
    "edits",
    "penalties",
    "logprobs",
    "is_limited",
    "has_bad_words",
)
_FLOAT_SCALARS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_NUM_FLOATS = len(_FLOAT_SCALARS) + MAX_LOGIT_BIAS  # of a packed row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """Every sequence row. A slice of one row (leaves without the leading axis) has the same class.

    `edits` and `logprobs` are 0 or 1: whether the row has a logit bias or min_tokens, and whether
    its samples come with log-probabilities. `penalties` is 1 when any penalty is not neutral,
    `is_limited` when only `allowed_ids` may be sampled, `has_bad_words` when `bad_words` has any.
    Ids at or past the vocabulary are padding; bad words end in the last column, after -1.
    """

    history: Int[Array, "*seqs max_len"]  # prompt and sampled tokens by position
    key: UInt32[Array, "*seqs 2"]  # counter-based noise: folded with the position of the token
    num_prompt: Int[Array, "*seqs"]
    min_tokens: Int[Array, "*seqs"]
    top_k: Int[Array, "*seqs"]  # 0: off
    edits: Int[Array, "*seqs"]
    penalties: Int[Array, "*seqs"]
    logprobs: Int[Array, "*seqs"]
    is_limited: Int[Array, "*seqs"]
    has_bad_words: Int[Array, "*seqs"]
    temperature: Float[Array, "*seqs"]  # 0: greedy
    top_p: Float[Array, "*seqs"]  # 1: off
    min_p: Float[Array, "*seqs"]  # 0: off
    repetition_penalty: Float[Array, "*seqs"]
    presence_penalty: Float[Array, "*seqs"]
    frequency_penalty: Float[Array, "*seqs"]
    suppressed_ids: Int[Array, "*seqs suppressed"]
    bias_ids: Int[Array, "*seqs biased"]
    bias_values: Float[Array, "*seqs biased"]
    allowed_ids: Int[Array, "*seqs allowed"]
    bad_words: Int[Array, "*seqs words length"]

    def with_history(self, history: Int[Array, "*seqs max_len"]) -> "RowState":
        """Return the rows with another history: all that a step changes."""
        return dataclasses.replace(self, history=history)


def zeros(shape: int | tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros in memory of their own, which later programs may take over.

    They are copied, not computed: a program per shape would cost a start more. On a CPU an array
    that is put on the device stays the host's.
    """
    host = np.zeros(shape, dtype)
    return jnp.asarray(host) if jax.default_backend() == "cpu" else jax.device_put(host)


def init_row_state(max_seqs: int, max_len: int) -> RowState:
    """Return rows that belong to nobody; their values are never read before `admit`."""
    scalars = {name: zeros(max_seqs, jnp.int32) for name in _INT_SCALARS[1:]}
    scalars |= {name: zeros(max_seqs, jnp.float32) for name in _FLOAT_SCALARS}
    return RowState(
        history=zeros((max_seqs, max_len), jnp.int32),
        key=zeros((max_seqs, 2), jnp.uint32),
        suppressed_ids=zeros((max_seqs, MAX_SUPPRESSED), jnp.int32),
        bias_ids=zeros((max_seqs, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=zeros((max_seqs, MAX_LOGIT_BIAS), jnp.float32),
        allowed_ids=zeros((max_seqs, MAX_ALLOWED_TOKEN_IDS), jnp.int32),
        bad_words=zeros((max_seqs, MAX_BAD_FORMS, MAX_BAD_WORD_TOKENS), jnp.int32),
        **scalars,
    )


def history_and_rest(state: RowState) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the history and all other fields, such that `RowState(history, *rest)` is the state.

    A step changes the history alone. What it does not give back costs the host nothing: jax makes
    an array of each result, with a buffer on every device.
    """
    history, *rest = jax.tree.leaves(state)
    return history, tuple(rest)


class OneRow:
    """One row of a state: its fields without the leading axis, each sliced when it is read.

    A branch of a program is traced, lowered and compiled with the fields that it reads alone.
    """

    def __init__(self, state: RowState, seq: Int[Array, ""]):
        self._state, self._seq = state, seq

    def __getattr__(self, name: str) -> jax.Array:
        field = getattr(self._state, name)
        return jax.lax.dynamic_index_in_dim(field, self._seq, keepdims=False)


def row_of(state: RowState, seq: Int[Array, ""]) -> OneRow:
    """Return one row, whose number must be that of a row."""
    return OneRow(state, seq)


def rows_of(state: RowState, seqs: Int[Array, "rows"]) -> RowState:
    """Return the slice of each named row, one after the other."""
    return jax.tree.map(lambda leaf: leaf[seqs], state)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRow:
    """One row on its way to the devices, as one array: each array goes to each of them."""

    # int32: bits of floats [scalars + biased], then
    # [scalars + suppressed + biased + allowed + bad words + max_len].
    values: np.ndarray


def pack_row(
    sampling: Sampling,
    token_ids: SequenceOf[int],
    num_prompt: int,
    seed: int,
    end_ids: SequenceOf[int],
    max_len: int,
    vocab: int,
    bad_words: SequenceOf[SequenceOf[int]] = (),
) -> PackedRow:
    """Return the row of a sequence that has `token_ids` so far (prompt, then sampled tokens).

    `end_ids` are the model's own end-of-sequence ids; with the request's stop ids they cannot be
    sampled before min_tokens. `bad_words` are the tokens of sampling.bad_words. ValueError when the
    tokens or ids do not fit.
    """
    held_back = _held_back(sampling, end_ids)
    _check_sizes(token_ids, held_back, max_len)
    bias = sampling.logit_bias
    scalars = _scalars(sampling, num_prompt, seed, vocab)
    scalars["has_bad_words"] = int(bool(bad_words))
    ints = np.concatenate(
        [
            np.array([scalars[n] for n in _INT_SCALARS], np.int32),
            _padded(held_back, MAX_SUPPRESSED, vocab),
            _padded(tuple(bias), MAX_LOGIT_BIAS, vocab),
            _padded(sampling.allowed_token_ids or (), MAX_ALLOWED_TOKEN_IDS, vocab),
            _aligned(bad_words),
            _padded(token_ids, max_len, 0),
        ]
    )
    floats = np.zeros(_NUM_FLOATS, np.float32)
    floats[: len(_FLOAT_SCALARS)] = [scalars[n] for n in _FLOAT_SCALARS]
    floats[len(_FLOAT_SCALARS) : len(_FLOAT_SCALARS) + len(bias)] = tuple(bias.values())
    return PackedRow(np.concatenate([floats.view(np.int32), ints]))


def admit(state: RowState, row: int, packed: PackedRow) -> RowState:
    """Return `state` (donated) with row `row` taken over by a packed sequence; see pack_row."""
    return _admit(state, np.concatenate([np.array([row], np.int32), packed.values]))


@functools.partial(jax.jit, donate_argnums=0)
def _admit(state: RowState, packed: Int[Array, "numbers"]) -> RowState:
    """Return `state` with the row that comes first in `packed`, followed by PackedRow.values."""
    row, ints_start = packed[0], 1 + _NUM_FLOATS
    floats = jax.lax.bitcast_convert_type(packed[1:ints_start], jnp.float32)
    ints = packed[ints_start:]
    values: dict[str, jax.Array] = {}
    for index, name in enumerate(_INT_SCALARS):
        values[name] = ints[index]
    values["key"] = _row_key(values.pop("seed"))
    start = len(_INT_SCALARS)
    values["suppressed_ids"] = ints[start : start + MAX_SUPPRESSED]
    start += MAX_SUPPRESSED
    values["bias_ids"] = ints[start : start + MAX_LOGIT_BIAS]
    start += MAX_LOGIT_BIAS
    values["allowed_ids"] = ints[start : start + MAX_ALLOWED_TOKEN_IDS]
    start += MAX_ALLOWED_TOKEN_IDS
    end = start + MAX_BAD_FORMS * MAX_BAD_WORD_TOKENS
    values["bad_words"] = ints[start:end].reshape(MAX_BAD_FORMS, MAX_BAD_WORD_TOKENS)
    values["history"] = ints[end:]
    for index, name in enumerate(_FLOAT_SCALARS):
        values[name] = floats[index]
    values["bias_values"] = floats[len(_FLOAT_SCALARS) :]
    return jax.tree.map(lambda old, new: old.at[row].set(new), state, RowState(**values))


def _row_key(seed: Int[Array, ""]) -> UInt32[Array, "2"]:
    """Return fold_in(key(0), seed) as raw key data."""
    return jax.random.key_data(jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), seed))


def _scalars(sampling: Sampling, num_prompt: int, seed: int, vocab: int) -> dict[str, int | float]:
    """Return the values of _INT_SCALARS and _FLOAT_SCALARS by name."""
    return {
        "seed": seed,
        "num_prompt": num_prompt,
        "min_tokens": sampling.min_tokens,
        "top_k": sampling.top_k if sampling.top_k < vocab else 0,
        "edits": int(bool(sampling.logit_bias) or _holds_back(sampling)),
        "penalties": int(sampling.uses_history),
        "logprobs": int(sampling.logprobs is not None),
        "is_limited": int(sampling.allowed_token_ids is not None),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _holds_back(sampling: Sampling) -> bool:
    """Return whether min_tokens is the device's matter; where a grammar binds it is the mask's."""
    return sampling.min_tokens > 0 and sampling.structured_outputs is None


def _held_back(sampling: Sampling, end_ids: SequenceOf[int]) -> tuple[int, ...]:
    if not _holds_back(sampling):
        return ()
    return tuple(sorted({*end_ids, *sampling.stop_token_ids}))


def _check_sizes(token_ids: SequenceOf[int], held_back: SequenceOf[int], max_len: int) -> None:
    if len(token_ids) > max_len:
        raise ValueError(f"A sequence of {len(token_ids)} tokens does not fit into {max_len}.")
    if len(held_back) > MAX_SUPPRESSED:
        raise ValueError(
            f"{len(held_back)} stop and end ids with min_tokens; at most {MAX_SUPPRESSED} fit."
        )


def _padded(values: SequenceOf[int], size: int, padding: int) -> np.ndarray:
    """Return int32 [size]: the values, then padding."""
    row = np.full(size, padding, np.int32)
    row[: len(values)] = values
    return row


def _aligned(words: SequenceOf[SequenceOf[int]]) -> np.ndarray:
    """Return int32 [forms x tokens]: each word at the end of its place, after -1."""
    table = np.full((MAX_BAD_FORMS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for index, word in enumerate(words):
        table[index, MAX_BAD_WORD_TOKENS - len(word) :] = word
    return table.reshape(-1)
