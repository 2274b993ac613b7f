"""Items of adapters: every row that has one is in exactly one item, of its adapter alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.adapter_items import adapter_items, cut
from lora_jax.ops.cases import POPULARITIES, popular


@pytest.mark.parametrize(("rows", "popularity"), [(1, "none"), *((70, p) for p in POPULARITIES)])
def test_rows_come_by_adapter_and_each_is_in_one_item(rows, popularity):
    slots = popular(popularity, rows, 9, np.random.default_rng(0))
    slots[rows // 2] = 6  # of those that are known
    make = jax.jit(lambda s: adapter_items(s, 7, max_rank=8, implementation="reference"))
    got = make(jnp.asarray(slots))
    known = np.where((slots >= 0) & (slots < 7), slots, -1)
    np.testing.assert_array_equal(got.row_to_slot, known)
    assert got.max_rank == 8
    np.testing.assert_array_equal(got.order, np.argsort(known.astype(np.uint32), kind="stable"))
    by_place, covered = known[np.asarray(got.order)], []
    for slot, expert, first, num_rows in np.asarray(got.items)[: int(got.num_items[0])]:
        assert expert == 0
        assert 1 <= num_rows <= 32
        assert set(by_place[first : first + num_rows]) == {slot}
        covered += range(first, first + num_rows)
    np.testing.assert_array_equal(covered, np.flatnonzero(by_place >= 0))


def test_an_expert_ends_an_item_and_so_does_a_row_without_an_adapter():
    slots = jnp.asarray([2, 2, 2, -1, 2, 0, 0, 0, 0, 0], jnp.int32)
    experts = jnp.asarray([1, 1, 3, 3, 3, 0, 0, 0, 0, 0], jnp.int32)
    items, count = cut(slots, experts, item_rows=4)
    assert count.tolist() == [5]
    want = [[2, 1, 0, 2], [2, 3, 2, 1], [2, 3, 4, 1], [0, 0, 5, 3], [0, 0, 8, 2]]
    assert items[:5].tolist() == want


@pytest.mark.parametrize("implementation", [None, "ffi", "xla"])
def test_platforms_whose_kernels_want_none_pay_nothing(implementation):
    slots = jnp.zeros(5, jnp.int32)
    assert adapter_items(slots, 3, implementation=implementation) is None


@pytest.mark.usefixtures("shapes_unchecked")
def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"row_to_slot \(2, 2\) must be rank 1"):
        adapter_items(jnp.zeros((2, 2), jnp.int32), 3)
    with pytest.raises(ValueError, match="num_slots 0"):
        adapter_items(jnp.zeros(2, jnp.int32), 0)
