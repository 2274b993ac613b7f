"""Row map: a stable sort by expert, by both implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.cases import POPULARITIES, popular
from lora_jax.ops.reroute import row_map

IMPLEMENTATIONS = ["ffi", "xla"]


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
    got = row_map(ids, jnp.int32(3), 3, implementation=implementation)
    assert got.group_sizes.tolist() == [2, 1, 0]
    assert got.order.tolist() == [2, 5, 4, 0, 1, 3]


@pytest.mark.usefixtures("shapes_unchecked")
def test_refuses_shapes_that_do_not_fit():
    ids = jnp.zeros((3, 2), jnp.int32)
    with pytest.raises(ValueError, match="num_experts 0"):
        row_map(ids, jnp.int32(3), 0)
