"""Device state of the running sequences: tokens and sampling parameters.

A running sequence owns one row. The row is written once when the sequence is admitted; after that
the step itself appends the sampled tokens, so that neither tokens nor parameters travel from the
host again. Every input token of a step is read from `history`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

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
    "top_k",  # 0: off
    "edits",
    "penalties",
    "logprobs",
    "is_limited",
    "has_bad_words",
)
_FLOAT_SCALARS = (
    "temperature",  # 0: greedy
    "top_p",  # 1: off
    "min_p",  # 0: off
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class _Place(NamedTuple):
    """Place of a field among the numbers of a row."""

    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def _placed(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Place]:
    """Return the places of fields that follow each other."""
    starts = itertools.accumulate((math.prod(shape) for shape in shapes.values()), initial=0)
    pairs = zip(shapes.items(), starts, strict=False)
    return {name: _Place(start, shape) for (name, shape), start in pairs}


_INTS = _placed(
    dict.fromkeys(_INT_SCALARS, ())
    | {"suppressed_ids": (MAX_SUPPRESSED,), "bias_ids": (MAX_LOGIT_BIAS,)}
    | {"allowed_ids": (MAX_ALLOWED_TOKEN_IDS,)}
    | {"bad_words": (MAX_BAD_FORMS, MAX_BAD_WORD_TOKENS)}
)
_FLOATS = _placed(dict.fromkeys(_FLOAT_SCALARS, ()) | {"bias_values": (MAX_LOGIT_BIAS,)})
_NUM_INTS, _NUM_FLOATS = (sum(p.size for p in places.values()) for places in (_INTS, _FLOATS))
_KEY = 2  # numbers of a row's key
_INTS_START = _KEY + _NUM_FLOATS  # in PackedRow.values
# Of Threefry-2x32: the words of key(0) and their parity, and how far its rounds rotate.
_WORD, _THREEFRY_KEY, _ROTATIONS = (
    2**32 - 1,
    (0, 0, 0x1BD11BDA),
    ((13, 15, 26, 6), (17, 29, 16, 24)),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """Every sequence row. Each name of _INTS and _FLOATS is an attribute too: [seqs, *shape].

    They lie in two arrays, because a call costs the host a microsecond for each array: on a CPU an
    update of 21 small arrays takes 148 us, of four 22.

    `edits` and `logprobs` are 0 or 1: whether the row has a logit bias or min_tokens, and whether
    its samples come with log-probabilities. `penalties` is 1 when any penalty is not neutral,
    `is_limited` when only `allowed_ids` may be sampled, `has_bad_words` when `bad_words` has any.
    Ids at or past the vocabulary are padding; bad words end in the last column, after -1.
    """

    history: Int[Array, "seqs max_len"]  # prompt and sampled tokens by position
    # Counter-based noise: folded with the position of the token. 0 where nothing is drawn.
    key: UInt32[Array, "seqs 2"]
    ints: Int[Array, "seqs ints"]
    floats: Float[Array, "seqs floats"]

    def __getattr__(self, name: str) -> jax.Array:
        numbers, place = self._place(name)
        columns = numbers[:, place.start : place.start + place.size]
        return columns.reshape(len(columns), *place.shape)

    def _place(self, name: str) -> tuple[jax.Array, _Place]:
        """Return the array that has a field, and its place there."""
        if name in _INTS:
            return self.ints, _INTS[name]
        if name in _FLOATS:
            return self.floats, _FLOATS[name]
        raise AttributeError(f"A row has no field {name!r}.")

    def of(self, seq: Int[Array, ""], name: str) -> jax.Array:
        """Return a field of one row."""
        if name in ("history", "key"):
            return jax.lax.dynamic_index_in_dim(getattr(self, name), seq, keepdims=False)
        numbers, place = self._place(name)
        row = jax.lax.dynamic_slice(numbers, (seq, place.start), (1, place.size))
        return row.reshape(place.shape)

    def with_history(self, history: Int[Array, "seqs max_len"]) -> "RowState":
        """Return the rows with another history: all that a step changes."""
        return RowState(history, self.key, self.ints, self.floats)


def zeros(shape: int | tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros in memory of their own, which later programs may take over.

    They are copied, not computed: a program per shape would cost a start more. On a CPU an array
    that is put on the device stays the host's.
    """
    host = np.zeros(shape, dtype)
    return jnp.asarray(host) if jax.default_backend() == "cpu" else jax.device_put(host)


def init_row_state(max_seqs: int, max_len: int) -> RowState:
    """Return rows that belong to nobody; their values are never read before `admit`."""
    return RowState(
        history=zeros((max_seqs, max_len), jnp.int32),
        key=zeros((max_seqs, 2), jnp.uint32),
        ints=zeros((max_seqs, _NUM_INTS), jnp.int32),
        floats=zeros((max_seqs, _NUM_FLOATS), jnp.float32),
    )


def history_and_rest(state: RowState) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the history and all other arrays, such that `RowState(history, *rest)` is the state.

    A step changes the history alone. What it does not give back costs the host nothing: jax makes
    an array of each result, with a buffer on every device.
    """
    return state.history, (state.key, state.ints, state.floats)


class OneRow:
    """One row of a state, each of its fields sliced when it is read.

    A branch of a program is traced, lowered and compiled with the fields that it reads alone.
    """

    def __init__(self, state: RowState, seq: Int[Array, ""]):
        self._state, self._seq = state, seq

    def __getattr__(self, name: str) -> jax.Array:
        return self._state.of(self._seq, name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Fields of some rows, each an attribute with these rows as its first axis, or of one row."""

    fields: dict[str, jax.Array]

    def __getattr__(self, name: str) -> jax.Array:
        if name not in (fields := self.__dict__.get("fields", {})):
            raise AttributeError(f"A row has no field {name!r}.")
        return fields[name]


Row = OneRow | Rows


def row_of(state: RowState, seq: Int[Array, ""]) -> OneRow:
    """Return one row, whose number must be that of a row."""
    return OneRow(state, seq)


def rows_of(state: RowState, seqs: Int[Array, "rows"], names: Iterable[str] = ()) -> Rows:
    """Return the slice of each named row, one after the other: these fields, or all of them."""
    names = names or ("history", "key", *_INTS, *_FLOATS)
    return Rows({name: getattr(state, name)[seqs] for name in names})


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRow:
    """One row on its way to the devices, as one array: each array goes to each of them."""

    # int32 [numbers_of_row(max_len)]: bits of the key, bits of floats, ints, history.
    values: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPrompt:
    """A row of which nothing is drawn, as a task head answers: only its tokens are ever read."""

    tokens: np.ndarray  # int32 [tokens]
    max_len: int
    vocab: int

    @property
    def values(self) -> np.ndarray:
        """PackedRow.values of the whole row."""
        values = _neutral(self.max_len, self.vocab).copy()
        start = _INTS_START + _NUM_INTS
        values[start : start + len(self.tokens)] = self.tokens
        return values


def pack_prompt(token_ids: SequenceOf[int], max_len: int, vocab: int) -> PackedPrompt:
    """Return the row of a sequence of which nothing is drawn; ValueError for too many tokens."""
    _check_sizes(token_ids, (), max_len)
    return PackedPrompt(np.array(token_ids, np.int32), max_len, vocab)


def numbers_of_row(max_len: int) -> int:
    """Return how many numbers of 4 bytes a row has, of sequences of up to `max_len` tokens."""
    return _INTS_START + _NUM_INTS + max_len


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
    values = _neutral(max_len, vocab).copy()
    floats, ints = values[_KEY:_INTS_START].view(np.float32), values[_INTS_START:]
    if sampling.temperature > 0:
        values[:_KEY].view(np.uint32)[:] = row_key(seed)
    bias = sampling.logit_bias
    ints[: len(_INT_SCALARS)] = (
        seed,
        num_prompt,
        sampling.min_tokens,
        sampling.top_k if sampling.top_k < vocab else 0,
        bool(bias) or _holds_back(sampling),
        sampling.uses_history,
        sampling.logprobs is not None,
        sampling.allowed_token_ids is not None,
        bool(bad_words),
    )
    floats[: len(_FLOAT_SCALARS)] = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    ints[_NUM_INTS : _NUM_INTS + len(token_ids)] = token_ids
    _fill(ints, _INTS["suppressed_ids"], held_back)
    if bias:
        _fill(ints, _INTS["bias_ids"], tuple(bias))
        _fill(floats, _FLOATS["bias_values"], tuple(bias.values()))
    _fill(ints, _INTS["allowed_ids"], sampling.allowed_token_ids or ())
    for index, word in enumerate(bad_words):
        end = _INTS["bad_words"].start + (index + 1) * MAX_BAD_WORD_TOKENS
        ints[end - len(word) : end] = word
    return PackedRow(values)


@functools.lru_cache(4)
def _neutral(max_len: int, vocab: int) -> np.ndarray:
    """Return a row's values without anything of a request: zeros and padding."""
    ints = np.zeros(_NUM_INTS + max_len, np.int32)
    for name in ("suppressed_ids", "bias_ids", "allowed_ids"):
        _fill(ints, _INTS[name], [vocab] * _INTS[name].size)
    _fill(ints, _INTS["bad_words"], [-1] * _INTS["bad_words"].size)
    return np.concatenate([np.zeros(_INTS_START, np.int32), ints])


def _fill(numbers: np.ndarray, place: _Place, values: SequenceOf[float]) -> None:
    """Write the first numbers of a field."""
    if values:
        numbers[place.start : place.start + len(values)] = values


def parts_of(packed: PackedRow) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return one row of RowState's history, key, ints and floats, as views of a packed row.

    Their dtypes are int32, uint32, int32 and float32, and each is 1-D, as long as the state's rows.
    """
    values = packed.values
    return (
        values[_INTS_START + _NUM_INTS :],
        values[:_KEY].view(np.uint32),
        values[_INTS_START : _INTS_START + _NUM_INTS],
        values[_KEY:_INTS_START].view(np.float32),
    )


def admit(state: RowState, row: int, packed: PackedRow | PackedPrompt) -> RowState:
    """Return `state` (donated) with row `row` taken over by a packed sequence; see pack_row."""
    return _admit(state, np.concatenate([np.array([row], np.int32), packed.values]))


@functools.partial(jax.jit, donate_argnums=0)
def _admit(state: RowState, packed: Int[Array, "numbers"]) -> RowState:
    """Return `state` with the row that comes first in `packed`, followed by PackedRow.values."""
    row, values = packed[0], packed[1:]
    new = (
        values[_INTS_START + _NUM_INTS :],
        jax.lax.bitcast_convert_type(values[:_KEY], jnp.uint32),
        values[_INTS_START : _INTS_START + _NUM_INTS],
        jax.lax.bitcast_convert_type(values[_KEY:_INTS_START], jnp.float32),
    )
    old = state.history, state.key, state.ints, state.floats
    pairs = zip(old, new, strict=True)
    # Not `at[row].set`, a scatter, with which a CPU takes 100 us for this program in place of 70.
    return RowState(*(jax.lax.dynamic_update_index_in_dim(o, n, row, 0) for o, n in pairs))


def row_key(seed: int) -> tuple[int, int]:
    """Return fold_in(key(0), seed) as raw key data: Threefry-2x32 of (0, seed), by the key 0.

    On the host: a program for it has a loop, which takes a CPU longer than the row's update.
    """
    left, right = _THREEFRY_KEY[0], (seed + _THREEFRY_KEY[1]) & _WORD
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            left = (left + right) & _WORD
            right = ((right << turn | right >> (32 - turn)) & _WORD) ^ left
        left = (left + _THREEFRY_KEY[(block + 1) % 3]) & _WORD
        right = (right + _THREEFRY_KEY[(block + 2) % 3] + block + 1) & _WORD
    return left, right


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
