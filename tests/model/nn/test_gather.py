"""Exchanges of a split, on fake devices: values arrive as they are, whatever their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from lora_jax.config import MoeConfig
from lora_jax.nn import gather as gather_module
from lora_jax.nn import moe
from lora_jax.nn.gather import (
    gather,
    gather_rows,
    local_index,
    num_own_rows,
    pick,
    shares_rows,
    swap_rows,
    take_owned,
    worst_of_devices,
)
from lora_jax.nn.lora import AdapterRouting
from lora_jax.sharding import AXIS, Split, make_mesh


def over_devices(split, body, specs, *arguments):
    mapped = jax.shard_map(body, mesh=split.mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return np.asarray(jax.jit(mapped)(*arguments))


def awkward(shape, dtype):
    """Numbers with a NaN, an infinity, a denormal and a negative zero among them."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x.flat[:4] = np.nan, -np.inf, 1e-40, -0.0
    return np.asarray(jnp.asarray(x).astype(dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [2, 4])
def test_columns_of_all_devices_side_by_side(devices, dtype):
    split, x = Split(make_mesh(devices)), awkward((3, 8), dtype)
    got = over_devices(split, lambda x: gather(x, split), P(None, AXIS), x)
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_row_as_its_owner_has_it(dtype):
    split, owner = Split(make_mesh(4)), np.array([2, 0, 3, 1, 1], np.int32)
    x = awkward((4, 5, 6), dtype)  # by device
    got = over_devices(split, lambda x, o: pick(x[0], o, split), (P(AXIS), P()), x, owner)
    want = x[owner, np.arange(5)]
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_each_device_has_its_columns_of_the_owners_rows(dtype):
    split, x = Split(make_mesh(2)), awkward((2, 3, 8), dtype)  # by device
    source = np.array([[2, 0, 1, 0], [0, 1, 0, 0]], np.int32)  # by device
    owner = np.array([0, 1, 1, 0], np.int32)

    def taken(x, source, owner):
        return jax.lax.all_gather(take_owned(x[0], source[0], owner, split), AXIS)

    got = over_devices(split, taken, (P(AXIS), P(AXIS), P()), x, source, owner)
    rows = x[owner, source[owner, np.arange(4)]]
    want = np.stack([rows[:, :4], rows[:, 4:]])
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


def test_each_device_has_all_columns_of_its_rows():
    split, x = Split(make_mesh(4)), awkward((8, 12), jnp.float32)
    got = over_devices(split, lambda x: gather_rows(swap_rows(x, split), split), P(None, AXIS), x)
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


def test_rows_of_all_devices_one_after_the_other():
    split, x = Split(make_mesh(4)), awkward((8, 4), jnp.float32)
    got = over_devices(split, lambda x: gather_rows(x, split), P(AXIS), x)
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize("num_rows", [3, 8])
def test_a_router_over_devices_has_the_logits_of_one(num_rows, monkeypatch):
    """Each device multiplies some of a prompt's rows; rows that are none count on no device."""
    monkeypatch.setattr(gather_module, "SHARED_ROWS", 8)
    split, config = Split(make_mesh(4)), MoeConfig(8, 2, 32, layers=(0,))
    router = moe.Router(64, config, 0, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    seen = []

    def logits(x, split):
        routing = AdapterRouting(
            jnp.int32(num_rows), jnp.full(8, -1, jnp.int32), None, (), 4, split=split
        )
        return router(x, routing)

    def gathered(x, split):
        seen.append(x.shape)
        return gather_rows(x, split)

    monkeypatch.setattr(moe, "gather_rows", gathered)
    want = np.asarray(jax.jit(lambda x: logits(x, None))(x))[:num_rows]
    got = over_devices(split, lambda x: logits(x, split), P(), x)[:num_rows]
    np.testing.assert_array_equal(got, want)
    assert seen == [(2, 8)]


def test_many_rows_are_shared_where_they_divide_and_each_share_has_its_own(monkeypatch):
    monkeypatch.setattr(gather_module, "SHARED_ROWS", 8)
    split = Split(make_mesh(4))
    found = [shares_rows(rows, split) for rows in (7, 8, 10, 12)]
    assert found == [False, True, False, True]
    assert not shares_rows(8, None)

    def counts(num_rows):
        return jax.lax.all_gather(num_own_rows(num_rows, 12, split), AXIS)

    for num_rows, want in ((12, [3, 3, 3, 3]), (7, [3, 3, 1, 0]), (0, [0, 0, 0, 0])):
        got = over_devices(split, counts, P(), np.int32(num_rows))
        np.testing.assert_array_equal(got, want)


def test_the_worst_status_of_all_devices():
    split, found = Split(make_mesh(4)), np.zeros((4, 5), np.int32)
    found[1, 0], found[3, 0], found[2, 4] = 1, 3, 2
    got = over_devices(split, lambda s: worst_of_devices(s[0], split), P(AXIS), found)
    np.testing.assert_array_equal(got, [3, 0, 0, 0, 2])
    statuses = jnp.arange(3)
    assert worst_of_devices(statuses, None) is statuses


def test_an_index_has_one_owner_and_is_local_only_there():
    split, index = Split(make_mesh(2)), np.arange(6, dtype=np.int32).reshape(2, 3)

    def local(index):
        return jax.lax.all_gather(local_index(index, 3)[1], AXIS)

    def owner(index):
        return local_index(index, 3)[0]

    np.testing.assert_array_equal(over_devices(split, owner, P(), index), [[0] * 3, [1] * 3])
    got = over_devices(split, local, P(), index)
    np.testing.assert_array_equal(got, [[[0, 1, 2], [-1, -1, -1]], [[-1, -1, -1], [0, 1, 2]]])


def test_one_device_has_no_trace_of_it():
    x, owner = jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)
    assert gather(x, None) is x
    assert pick(x, owner, None) is x
