"""Rows and their adapters: who is touched, where, and with which of the table's rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.nn.lora import Rows, apply_lora
from lora_jax.ops import dispatch

RNG = np.random.default_rng(0)
NAMES = ("q_proj", "router")
POOL_IN, POOL_OUT = RNG.standard_normal((9, 6)), RNG.standard_normal((9, 4))


def make_slots() -> AdapterSlots:
    """Two modules x three layers x two slots; only (router, layer 2, slot 1) has an adapter."""
    entries = np.zeros((2, 3, 2, 5), np.int32)
    scaling = np.zeros((2, 3, 2), np.float32)
    entries[1, 2, 1] = 3, 5, 2, 0, 0  # A rows 3..4, B rows 5..6
    scaling[1, 2, 1] = 0.5
    pools = {"6": jnp.asarray(POOL_IN, jnp.float32), "4": jnp.asarray(POOL_OUT, jnp.float32)}
    return AdapterSlots(pools, jnp.asarray(entries), jnp.asarray(scaling))


def make_rows(slots: list[int], adapters: AdapterSlots | None) -> Rows:
    return Rows(jnp.int32(len(slots)), jnp.asarray(slots, jnp.int32), adapters, NAMES, max_rank=2)


X = jnp.asarray(RNG.standard_normal((4, 6)), jnp.float32)
Y = jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)
DELTA = 0.5 * np.asarray(X) @ POOL_IN[3:5].T @ POOL_OUT[5:7]


def test_each_row_gets_its_own_adapter():
    got = make_rows([1, -1, 0, 1], make_slots()).add_lora(Y, X, "router", 2)
    touched = np.array([True, False, False, True])[:, None]
    np.testing.assert_allclose(got, np.asarray(Y) + DELTA * touched, atol=1e-5)
    np.testing.assert_array_equal(got[1:3], Y[1:3])


@pytest.mark.parametrize(("module", "layer"), [("q_proj", 2), ("router", 1)])
def test_other_sites_are_left_alone(module, layer):
    got = make_rows([1, 1, 1, 1], make_slots()).add_lora(Y, X, module, layer)
    np.testing.assert_array_equal(got, Y)


def test_several_modules_at_once():
    modules = ("router", "o_proj", "q_proj")
    ys = tuple(Y + m for m in range(3))
    rows = make_rows([1, -1, 0, 1], make_slots())
    got = rows.add_loras(ys, X, modules, 2)
    for y, module, new in zip(ys, modules, got, strict=True):
        np.testing.assert_array_equal(new, rows.add_lora(y, X, module, 2))
    assert got[1] is ys[1]  # which no adapter can have


def test_nothing_is_computed_where_no_adapter_can_be():
    assert make_rows([1, 1, 1, 1], None).add_lora(Y, X, "router", 2) is Y
    assert make_rows([1, 1, 1, 1], make_slots()).add_lora(Y, X, "o_proj", 2) is Y
    assert make_rows([1, 1, 1, 1], make_slots()).add_lora(Y, X, None, 2) is Y


def test_apply_lora_by_index():
    slots = jnp.full((4,), 1, jnp.int32)
    got = apply_lora(Y, X, make_slots(), 1, 2, slots, max_rank=2)
    np.testing.assert_allclose(got, np.asarray(Y) + DELTA, atol=1e-5)


def test_gathered_rows():
    rows = make_rows([1, -1, 0], None).gathered(jnp.asarray([2, 2, 0, 1], jnp.int32), jnp.int32(3))
    assert int(rows.num_rows) == 3
    np.testing.assert_array_equal(rows.row_to_slot, [0, 0, 1, -1])


def test_items_are_made_once_and_only_where_a_kernel_wants_them(monkeypatch):
    rows = make_rows([1, -1, 0, 1], make_slots())
    assert rows.with_items().items is None
    monkeypatch.setenv(dispatch.ENV, "reference")
    assert make_rows([1, -1, 0, 1], None).with_items().items is None
    with_items = rows.with_items()
    assert with_items.items.order.tolist() == [2, 0, 3, 1]
    got = with_items.add_lora(Y, X, "router", 2)
    np.testing.assert_array_equal(got, rows.add_lora(Y, X, "router", 2))
    moved = with_items.gathered(jnp.asarray([3, 0], jnp.int32), jnp.int32(2))
    assert moved.items is None  # they were those of other rows


@pytest.mark.parametrize(("name", "wide"), [("ffi", True), ("xla", True), ("cuda", False)])
def test_deltas_are_what_is_added_and_none_where_no_adapter_can_be(monkeypatch, name, wide):
    rows = make_rows([1, -1, 0, 1], make_slots())
    touched = np.array([True, False, False, True])[:, None]
    monkeypatch.setattr(dispatch, "candidates", lambda implementation=None: (name, "reference"))
    got, untouched = rows.deltas(X, ("router", "o_proj"), 4, 2)
    assert got is not None
    assert untouched is not None
    np.testing.assert_allclose(got, DELTA * touched, atol=1e-5)
    assert not np.asarray(untouched).any()
    assert rows.deltas(X, ("o_proj", "k_proj"), 4, 2) == (None, None)
    assert make_rows([1], None).deltas(X[:1], ("router",), 4, 2) == (None,)
    slots, x = make_slots(), X.astype(jnp.bfloat16)
    pools = {width: pool.astype(jnp.bfloat16) for width, pool in slots.pools.items()}
    rows = make_rows([1, -1, 0, 1], dataclasses.replace(slots, pools=pools))
    narrow = jax.eval_shape(lambda: rows.deltas(x, ("o_proj", "router"), 4, 1))
    assert {a.dtype for a in narrow} == {jnp.dtype(jnp.float32 if wide else jnp.bfloat16)}
