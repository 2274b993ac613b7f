"""Rows and their adapters: who is touched, where, and with which of the table's rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ReadRows
from lora_jax.nn.lora import AdapterRouting, add_lora, lora_deltas
from lora_jax.ops import dispatch, lora_gemm
from lora_jax.ops.dispatch import ANY, Op
from lora_jax.ops.lora_gemm import LORA_GEMM

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


def make_rows(slots: list[int], adapters: AdapterSlots | None) -> AdapterRouting:
    return AdapterRouting(
        jnp.int32(len(slots)), jnp.asarray(slots, jnp.int32), adapters, NAMES, max_rank=2
    )


X = jnp.asarray(RNG.standard_normal((4, 6)), jnp.float32)
Y = jnp.asarray(RNG.standard_normal((4, 4)), jnp.float32)
DELTA = 0.5 * np.asarray(X) @ POOL_IN[3:5].T @ POOL_OUT[5:7]


def test_each_row_gets_its_own_adapter():
    got = add_lora((Y,), X, make_rows([1, -1, 0, 1], make_slots()), ("router",), 2)[0]
    touched = np.array([True, False, False, True])[:, None]
    np.testing.assert_allclose(got, np.asarray(Y) + DELTA * touched, atol=1e-5)
    np.testing.assert_array_equal(got[1:3], Y[1:3])


@pytest.mark.parametrize(("module", "layer"), [("q_proj", 2), ("router", 1)])
def test_other_sites_are_left_alone(module, layer):
    got = add_lora((Y,), X, make_rows([1, 1, 1, 1], make_slots()), (module,), layer)[0]
    np.testing.assert_array_equal(got, Y)


def test_several_modules_at_once():
    modules = ("router", "o_proj", "q_proj")
    ys = tuple(Y + m for m in range(3))
    rows = make_rows([1, -1, 0, 1], make_slots())
    got = add_lora(ys, X, rows, modules, 2)
    for y, module, new in zip(ys, modules, got, strict=True):
        np.testing.assert_array_equal(new, add_lora((y,), X, rows, (module,), 2)[0])
    assert got[1] is ys[1]  # which no adapter can have


def test_nothing_is_computed_where_no_adapter_can_be():
    assert add_lora((Y,), X, make_rows([1, 1, 1, 1], None), ("router",), 2)[0] is Y
    assert add_lora((Y,), X, make_rows([1, 1, 1, 1], make_slots()), ("o_proj",), 2)[0] is Y
    assert add_lora((Y,), X, make_rows([1, 1, 1, 1], make_slots()), (None,), 2)[0] is Y


def test_gathered_rows():
    rows = make_rows([1, -1, 0], None).gathered(jnp.asarray([2, 2, 0, 1], jnp.int32), jnp.int32(3))
    assert int(rows.num_rows) == 3
    np.testing.assert_array_equal(rows.row_to_slot, [0, 0, 1, -1])


def test_padding_behind_the_rows_that_are_read_has_no_adapter():
    """No kernel of LoRA is told the number of rows: it would compute the first token's for each."""
    rows = make_rows([1, -1, 0], make_slots())
    rows = dataclasses.replace(rows, row_to_esft_slot=jnp.asarray([2, 1, 0], jnp.int32))
    read = ReadRows(jnp.asarray([2, 0, 0, 0], jnp.int32), jnp.int32(2))
    got = rows.without(rows.row_to_slot).of_read(read)
    assert int(got.num_rows) == 2
    assert got.surplus is not None
    for each in (got, got.surplus):
        assert each.row_to_slot.tolist() == [0, 1, -1, -1]
        np.testing.assert_array_equal(each.row_to_esft_slot, [0, 2, -1, -1])
    assert make_rows([1, -1, 0], None).of_read(read).row_to_esft_slot is None


def test_items_are_made_once_and_only_where_a_kernel_wants_them(monkeypatch):
    rows = make_rows([1, -1, 0, 1], make_slots())
    assert rows.with_items().items is None
    monkeypatch.setenv(dispatch.ENV, "reference")
    assert make_rows([1, -1, 0, 1], None).with_items().items is None
    with_items = rows.with_items()
    assert with_items.items.order.tolist() == [2, 0, 3, 1]
    got = add_lora((Y,), X, with_items, ("router",), 2)[0]
    np.testing.assert_array_equal(got, add_lora((Y,), X, rows, ("router",), 2)[0])
    moved = with_items.gathered(jnp.asarray([3, 0], jnp.int32), jnp.int32(2))
    assert moved.items is None  # they were those of other rows


@pytest.mark.parametrize(("name", "wide"), [("ffi", True), ("cuda", False)])
def test_deltas_are_what_is_added_and_none_where_no_adapter_can_be(monkeypatch, name, wide):
    rows = make_rows([1, -1, 0, 1], make_slots())
    touched = np.array([True, False, False, True])[:, None]
    portable = {i.name: i for i in LORA_GEMM.implementations}["reference"]
    kernel = dataclasses.replace(portable, name=name, wide_sums=wide, platforms=ANY)
    monkeypatch.setattr(lora_gemm, "LORA_GEMM", Op("lora_gemm", (kernel,)))
    got, untouched = lora_deltas(X, rows, ("router", "o_proj"), 4, 2)
    assert got is not None
    assert untouched is not None
    np.testing.assert_allclose(got, DELTA * touched, atol=1e-5)
    assert not np.asarray(untouched).any()
    assert lora_deltas(X, rows, ("o_proj", "k_proj"), 4, 2) == (None, None)
    assert lora_deltas(X[:1], make_rows([1], None), ("router",), 4, 2) == (None,)
    slots, x = make_slots(), X.astype(jnp.bfloat16)
    pools = {width: pool.astype(jnp.bfloat16) for width, pool in slots.pools.items()}
    rows = make_rows([1, -1, 0, 1], dataclasses.replace(slots, pools=pools))
    narrow = jax.eval_shape(lambda: lora_deltas(x, rows, ("o_proj", "router"), 4, 1))
    assert {a.dtype for a in narrow} == {jnp.dtype(jnp.float32 if wide else jnp.bfloat16)}
