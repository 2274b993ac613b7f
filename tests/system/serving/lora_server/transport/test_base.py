"""Rows go where the plan has their adapter, layer and expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.transport.base import ClientStats, Request, push_rows

PLANS = [
    ServerLayout(AdapterShape(6, 5, 8, 1), **degrees)
    for degrees in ({}, {"ep": 4}, {"pp": 3}, {"ep": 2, "pp": 2}, {"dp": 4})
]


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(PLANS),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 7)), min_size=7, max_size=7),
)
def test_rows_go_where_the_plan_says(plan, layer, pairs):
    adapters, experts = (jnp.asarray(column, jnp.int32) for column in zip(*pairs, strict=True))
    rows = push_rows(plan, layer, adapters, experts, jnp.int32(5), jnp.int32(9))
    wanted = [plan.device_of(a, layer, e) if a >= 0 else -1 for a, e in pairs]
    assert np.asarray(rows.row_to_server).tolist() == wanted
    assert rows.row_to_server.dtype == jnp.int32
    assert (int(rows.num_rows), int(rows.table_version)) == (5, 9)


def test_rows_are_a_pytree():
    pairs = jnp.zeros(4, jnp.int32)
    rows = push_rows(PLANS[1], 0, pairs, pairs, jnp.int32(4), jnp.int32(0))
    doubled = jax.tree.map(lambda leaf: leaf * 2, rows)
    assert int(doubled.num_rows) == 8


def test_a_request_shows_real_rows_and_as_many_more_as_asked():
    slot = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8), np.arange(8)
    request = Request(1, 2, 3, 0, 0, 5, 7, *slot)
    assert (len(request.x), len(request.adapters), len(request.experts)) == (5, 5, 5)
    assert [len(array) for array in request.padded(8)] == [8, 8, 8]
    assert request.padded(5)[0].base is slot[0] or request.padded(5)[0].base is slot[0].base
    for rows in (4, 9):
        with pytest.raises(ValueError, match=f"{rows} rows are not in 5..8"):
            request.padded(rows)


def test_a_quantile_of_waits_is_the_power_of_two_above():
    lengths = [0] * 64
    stats = ClientStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, tuple(lengths))
    assert stats.wait_quantile(0.99) == 0
    lengths[10], lengths[20] = 99, 1
    stats = ClientStats(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, tuple(lengths))
    found = [stats.wait_quantile(share) for share in (0.0, 0.5, 0.99, 0.995, 1.0)]
    assert found == [2**11 / 1e9] * 3 + [2**21 / 1e9] * 2
