"""The checks that tests run under: wrong arrays are refused, in the package's own code too."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from support.checks.array_checks import checked

from lora_jax.typing import Array, Float, Int
from serving.steps.sampling.sampler import LogitRows, argmax


@checked
def joined(a: Float[Array, "rows d"], b: Float[Array, "rows d"] | None) -> Float[Array, "rows d"]:
    return a if b is None else jnp.concatenate([a, b])


@checked
def first(*, values: tuple[Int[Array, "n"], str]) -> Int[Array, ""]:
    return values[0][0]


ROWS = jnp.zeros((2, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda: joined(jnp.zeros(3), None),
        lambda: joined(ROWS, jnp.zeros((1, 3))),
        lambda: joined(ROWS, ROWS),  # gives four rows
        lambda: joined(jnp.zeros((2, 3), jnp.int32), None),
        lambda: first(values=(ROWS, "")),
        lambda: jax.jit(joined)(ROWS, ROWS),
        lambda: argmax(ROWS),
        lambda: argmax(jnp.zeros(3, jnp.int32)),
        lambda: dataclasses.replace(rows(), positions=jnp.zeros(3, jnp.int32)),
    ],
)
def test_a_wrong_array_is_refused(call):
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


def rows() -> LogitRows:
    empty = jnp.zeros(2, jnp.int32)
    return LogitRows(jnp.int32(0), empty, empty, empty, empty, empty)


def test_right_arrays_pass():
    assert joined(ROWS, None).shape == (2, 3)
    assert first(values=(jnp.arange(3, dtype=jnp.int32), "")) == 0
    assert argmax(jnp.arange(3.0)) == 2
    assert rows().num_rows == 0


def test_what_names_no_array_is_left_as_it_is():
    def plain(count: int, name: str | None = None) -> list[int]:
        return [count]

    assert checked(plain) is plain


def test_a_test_may_turn_checks_off(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert joined(jnp.zeros(3), None).shape == (3,)
