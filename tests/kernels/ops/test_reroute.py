"""Row map and reroute: stable sorts by expert, by both implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.item_cases import check_items

from lora_jax.ops import adapter_items
from lora_jax.ops.cases import POPULARITIES, popular
from lora_jax.ops.reroute import reroute, row_map

IMPLEMENTATIONS = ["ffi", "xla"]
# One program each: op by op they are thirty to fifty.
items_of = jax.jit(adapter_items.reference, static_argnums=1)
jitted_map = jax.jit(row_map, static_argnames=("num_experts", "implementation"))
jitted_reroute = jax.jit(reroute, static_argnames=("num_groups", "implementation"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(("tokens", "k", "experts", "real"), [(1, 1, 1, 1), (37, 4, 9, 30)])
def test_matches_numpy(tokens, k, experts, real, popularity, implementation):
    rng = np.random.default_rng(0)
    ids = popular(popularity, tokens * k, experts, rng).reshape(tokens, k)
    call = jax.jit(lambda i, n: row_map(i, n, experts, implementation=implementation))
    got = call(jnp.asarray(ids), jnp.int32(real))
    key = np.where((np.arange(tokens)[:, None] < real) & (ids >= 0), ids, experts).reshape(-1)
    order = np.argsort(key, kind="stable")
    np.testing.assert_array_equal(got.order, order)
    np.testing.assert_array_equal(np.asarray(got.inverse)[order], np.arange(tokens * k))
    np.testing.assert_array_equal(got.group_sizes, np.bincount(key, minlength=experts)[:experts])
    np.testing.assert_array_equal(got.row_to_token, order // k)
    np.testing.assert_array_equal(got.row_to_expert, np.where(key < experts, key, 0)[order])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_that_are_no_expert_are_in_no_group(implementation):
    ids = jnp.array([[3, -1], [0, 99], [1, 0]], jnp.int32)
    got = jitted_map(ids, jnp.int32(3), 3, implementation=implementation)
    assert got.group_sizes.tolist() == [2, 1, 0]
    assert got.order.tolist() == [2, 5, 4, 0, 1, 3]


@pytest.mark.usefixtures("shapes_unchecked")
def test_refuses_shapes_that_do_not_fit():
    ids = jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ValueError, match="num_experts 0"):
        row_map(ids, jnp.int32(3), 0)
    with pytest.raises(ValueError, match=r"topk_ids \(3, 2\) is float32, expected int32"):
        row_map(ids.astype(jnp.float32), jnp.int32(3), 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "slots", "real"), [(1, 1, 1, 1, 1), (37, 4, 9, 3, 30)]
)
def test_reroute_sorts_what_the_table_says(
    tokens, k, experts, slots, real, popularity, implementation
):
    rng = np.random.default_rng(1)
    ids = popular(popularity, tokens * k, experts, rng).reshape(tokens, k)
    groups = experts + 4 * slots
    table = np.tile(np.arange(experts, dtype=np.int32), (slots, 1))
    own = rng.random(table.shape) < 0.4
    table[own] = rng.integers(experts, groups, own.sum())
    token_to_slot = rng.integers(-1, slots, tokens).astype(np.int32)
    call = jax.jit(lambda i, s, t, n: reroute(i, s, t, n, groups, implementation=implementation))
    got = call(jnp.asarray(ids), jnp.asarray(token_to_slot), jnp.asarray(table), jnp.int32(real))
    key = np.full((tokens, k), groups)
    for t, j in np.ndindex(tokens, k):
        if t < real and ids[t, j] >= 0:
            slot = token_to_slot[t]
            key[t, j] = ids[t, j] if slot < 0 else table[slot, ids[t, j]]
    order = np.argsort(key.reshape(-1), kind="stable")
    np.testing.assert_array_equal(got.order, order)
    np.testing.assert_array_equal(np.asarray(got.inverse)[order], np.arange(tokens * k))
    sizes = np.bincount(key.reshape(-1), minlength=groups + 1)[:groups]
    np.testing.assert_array_equal(got.group_sizes, sizes)
    np.testing.assert_array_equal(got.row_to_token, order // k)
    chosen = np.where(key < groups, ids, 0).reshape(-1)
    np.testing.assert_array_equal(got.row_to_expert, chosen[order])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_adapters_reroute_is_row_map(implementation):
    rng = np.random.default_rng(2)
    ids = jnp.asarray(rng.integers(-1, 6, (20, 3)), jnp.int32)
    table = jnp.full((2, 5), 9, jnp.int32)
    slots = jnp.asarray(rng.choice([-1, -7, 2, 99], 20), jnp.int32)  # none is the table's
    got = jitted_reroute(ids, slots, table, jnp.int32(18), 12, implementation=implementation)
    want = jitted_map(ids, jnp.int32(18), 5, implementation=implementation)
    for name in ("order", "inverse", "row_to_token", "row_to_expert"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    np.testing.assert_array_equal(got.group_sizes[:5], want.group_sizes)
    assert not np.asarray(got.group_sizes)[5:].any()


@pytest.mark.parametrize(("popularity", "esft"), [("zipf", True), ("uniform", False)])
def test_rows_of_an_adapter_stand_together_within_a_group(popularity, esft):
    rng = np.random.default_rng(3)
    tokens, k, experts, groups = 23, 3, 4, 9
    ids = jnp.asarray(rng.integers(-1, experts, (tokens, k)), jnp.int32)
    slots = jnp.asarray(popular(popularity, tokens, 5, rng))
    adapters = items_of(slots, 5)
    table = jnp.asarray(rng.integers(0, groups, (2, experts)), jnp.int32)
    owners = jnp.asarray(rng.integers(-1, 2, tokens) if esft else np.full(tokens, -1), jnp.int32)
    call = jax.jit(
        lambda a: reroute(
            ids, owners, table, jnp.int32(20), groups, adapters=a, implementation="reference"
        )
    )
    plain, got = call(None), call(adapters)
    np.testing.assert_array_equal(got.group_sizes, plain.group_sizes)
    np.testing.assert_array_equal(np.asarray(got.inverse)[got.order], np.arange(tokens * k))
    order, lora = np.asarray(got.order), np.asarray(slots)
    ends = np.cumsum(got.group_sizes)
    group = np.searchsorted(ends, np.arange(tokens * k), side="right")
    plain_group = group[np.asarray(plain.inverse)]  # of rows; the groups have the same places
    np.testing.assert_array_equal(plain_group[order], group)
    key = np.stack([group, lora[order // k].astype(np.uint32), order])
    np.testing.assert_array_equal(key, key[:, np.lexsort(key[::-1])])
    check_items(np.asarray(got.items.items)[: int(got.items.num_items[0])], got, most=32)
    np.testing.assert_array_equal(
        got.items.row_to_slot, np.where(group < groups, lora[got.row_to_token], -1)
    )


def test_where_no_kernel_wants_items_the_map_has_none():
    ids, slots = jnp.asarray([[0], [1], [0]], jnp.int32), jnp.asarray([1, 0, 0], jnp.int32)
    adapters = items_of(slots, 2)
    got = row_map(ids, jnp.int32(3), 2, adapters=adapters, implementation="ffi")
    assert got.items is None
    assert got.order.tolist() == [0, 2, 1]
    with_items = jitted_map(ids, jnp.int32(3), 2, adapters=adapters, implementation="reference")
    assert with_items.order.tolist() == [2, 0, 1]


@pytest.mark.usefixtures("shapes_unchecked")
def test_row_map_refuses_adapters_of_other_tokens():
    adapters = items_of(jnp.zeros(4, jnp.int32), 2)
    with pytest.raises(ValueError, match=r"adapters has shape \(4,\), expected \(3,\)"):
        row_map(jnp.zeros((3, 1), jnp.int32), jnp.int32(3), 2, adapters=adapters)


@pytest.mark.usefixtures("shapes_unchecked")
def test_reroute_refuses_shapes_that_do_not_fit():
    ids, slots, n = jnp.zeros((3, 2), jnp.int32), jnp.zeros((3,), jnp.int32), jnp.int32(3)
    table = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match="not empty"):
        reroute(ids, slots, jnp.zeros((0, 4), jnp.int32), n, 8)
    with pytest.raises(ValueError, match=r"token_to_slot has shape \(2,\), expected \(3,\)"):
        reroute(ids, slots[:2], table, n, 8)
    with pytest.raises(ValueError, match="3 groups do not hold 4 experts"):
        reroute(ids, slots, table, n, 3)
    with pytest.raises(ValueError, match=r"table \(2, 4\) is float32, expected int32"):
        reroute(ids, slots, table.astype(jnp.float32), n, 8)
