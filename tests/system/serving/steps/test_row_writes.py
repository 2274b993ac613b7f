"""Rows of new sequences: what the host writes is what the program writes."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from serving.api.sampling import Sampling
from serving.steps import row_writes as module
from serving.steps.device_state import admit, init_row_state, pack_prompt, pack_row
from serving.steps.row_writes import RowWrites

MAX_LEN, VOCAB = 24, 50
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.5, top_p=0.75, min_tokens=2, logit_bias={3: 1.5}, logprobs=2),
    Sampling(allowed_token_ids=(1, 4), presence_penalty=0.25),
]


def packed(number: int):
    return pack_row(SAMPLINGS[number], (9, 8, 7), 3, number, (0,), MAX_LEN, VOCAB, ((5, 6),))


def test_the_host_writes_what_the_program_writes():
    writes, programs = RowWrites(by_host=True), RowWrites(by_host=False)
    state, want = init_row_state(4, MAX_LEN), init_row_state(4, MAX_LEN)
    for number, row in enumerate((2, 0, 2)):
        before = state
        state, want = (
            writes.admit(state, row, packed(number)),
            programs.admit(want, row, packed(number)),
        )
        assert state is before, "no program ran"
        for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_arrays_that_lie_elsewhere_since_are_written_where_they_lie():
    writes = RowWrites(by_host=True)
    first, second = init_row_state(2, MAX_LEN), init_row_state(2, MAX_LEN)
    for state in (first, second, first):
        writes.admit(state, 1, packed(1))
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.asarray(one)[0].any()


@pytest.mark.parametrize("name", ["history", "key", "ints", "floats"])
def test_while_an_array_is_not_there_a_program_writes(name: str, monkeypatch: pytest.MonkeyPatch):
    there, not_yet = SimpleNamespace(is_ready=lambda: True), SimpleNamespace(is_ready=lambda: False)
    names = ("history", "key", "ints", "floats")
    state: Any = SimpleNamespace(**{n: not_yet if n == name else there for n in names})
    calls = []
    monkeypatch.setattr(module, "admit", lambda *given: calls.append(given))
    row = packed(0)
    RowWrites(by_host=True).admit(state, 1, row)
    assert calls == [(state, 1, row)]


def test_the_row_of_a_step_that_has_ended_is_written_by_the_host():
    state = admit(init_row_state(4, MAX_LEN), 1, packed(0))
    jax.block_until_ready(state)
    assert RowWrites(by_host=True).admit(state, 3, packed(1)) is state


def test_of_a_prompt_of_which_nothing_is_drawn_the_host_writes_the_tokens_alone():
    writes, state = RowWrites(by_host=True), init_row_state(4, MAX_LEN)
    writes.admit(state, 2, packed(1))
    before = [np.array(leaf) for leaf in jax.tree.leaves(state)]
    assert writes.admit(state, 2, pack_prompt([5, 4], MAX_LEN, VOCAB)) is state
    before[0][2, :2] = 5, 4
    for got, wanted in zip(jax.tree.leaves(state), before, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_prompt_arrives_by_a_program_too_and_one_that_is_too_long_is_named():
    prompt = pack_prompt([5, 4], MAX_LEN, VOCAB)
    state = RowWrites(by_host=False).admit(init_row_state(4, MAX_LEN), 1, prompt)
    np.testing.assert_array_equal(state.history[1], [5, 4] + [0] * (MAX_LEN - 2))
    with pytest.raises(ValueError, match="25 tokens does not fit into 24"):
        pack_prompt([0] * 25, MAX_LEN, VOCAB)


@pytest.mark.parametrize("ends_at", range(6))
@pytest.mark.parametrize("is_prompt", [True, False])
def test_a_step_may_end_between_any_two_looks_at_it(
    ends_at: int, is_prompt: bool, monkeypatch: pytest.MonkeyPatch
):
    """A prompt of a task head ended the engine where the step ended after the first look."""
    looks: list[object] = []

    def has_ended(array: jax.Array) -> bool:
        looks.append(array)
        return len(looks) > ends_at

    monkeypatch.setattr(module, "has_ended", has_ended)
    row = pack_prompt([5, 4], MAX_LEN, VOCAB) if is_prompt else packed(0)
    state = RowWrites(by_host=True).admit(init_row_state(4, MAX_LEN), 2, row)
    want = admit(init_row_state(4, MAX_LEN), 2, row)
    np.testing.assert_array_equal(state.history, want.history)
    if not is_prompt:
        for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(got, wanted)
