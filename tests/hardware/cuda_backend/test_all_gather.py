"""The all-gather between real GPUs of one process (test_emulated_gather: the same on a CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cuda_backend.all_gather import (
    GatherGroup,
    all_gather,
    all_to_all,
    all_to_all_owned,
    all_to_all_rows,
)
from lora_jax.ops.all_gather import all_gather as op

pytestmark = pytest.mark.multigpu
COLUMNS, BY_DEVICE = PartitionSpec(None, "tp"), PartitionSpec("tp")


@pytest.fixture(scope="module")
def group():
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    return GatherGroup(len(jax.devices()))


def sharded(group, body, out_specs=COLUMNS):
    mesh = jax.make_mesh((group.size,), ("tp",), devices=jax.devices()[: group.size])
    call = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=COLUMNS, out_specs=out_specs, check_vma=False)
    )
    return lambda x: call(jax.device_put(x, NamedSharding(mesh, COLUMNS)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_device_has_all_columns_for_every_size(group, dtype):
    rng = np.random.default_rng(0)
    unit = 16 // jnp.dtype(dtype).itemsize
    for rows, units in [(1, 1), (8, 128), (64, 512), (512, 512), (3, 7), (4096, 1024), (64, 512)]:
        x = jnp.asarray(rng.normal(size=(rows, units * unit * group.size)), dtype)
        # One copy of each device's result beside the other's.
        got = sharded(group, lambda v: op(v, "tp", group=group.number)[None], PartitionSpec("tp"))(
            x
        )
        for device in np.asarray(got):
            np.testing.assert_array_equal(device, np.asarray(x))
    group.check()


def test_a_chain_of_exchanges_reads_nothing_stale(group):
    """200 exchanges in one program, each of what the one before has brought."""

    def chain(v):
        for _ in range(200):
            whole = all_gather(v, "tp", group.number)
            me, width = jax.lax.axis_index("tp"), v.shape[1]
            turned = (me + 1) % group.size  # the next device's columns
            v = jax.lax.dynamic_slice_in_dim(whole, turned * width, width, axis=1) + 1
        return v

    x = jnp.arange(16 * 64 * group.size, dtype=jnp.float32).reshape(16, -1)
    got = np.asarray(sharded(group, chain)(x))
    width = x.shape[1] // group.size
    want = np.roll(np.asarray(x), -(200 % group.size) * width, axis=1) + 200
    np.testing.assert_array_equal(got, want)
    group.check()


@pytest.mark.parametrize(("rows", "units"), [(1, 1), (64, 64), (512, 128), (4096, 512), (3, 5)])
def test_every_device_has_its_columns_of_all(group, rows, units):
    """All-to-all, in words and in pieces, in turn with all-gathers."""
    width = units * 16 // 2
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, width * group.size**2)), "bfloat16")

    def both(v):
        return all_to_all(v, "tp", group.number)[None], op(v, "tp", group=group.number)[None]

    swapped, gathered = sharded(group, both, (BY_DEVICE, BY_DEVICE))(x)
    parts = np.asarray(x).reshape(rows, group.size, group.size, width)  # by sender and receiver
    for me in range(group.size):
        want = parts[:, :, me].reshape(rows, -1)
        np.testing.assert_array_equal(np.asarray(swapped)[me], want)
        np.testing.assert_array_equal(np.asarray(gathered)[me], np.asarray(x))
    group.check()


@pytest.mark.parametrize(("rows", "units"), [(1, 1), (64, 64), (512, 128), (2048, 512), (3, 5)])
def test_every_device_has_all_columns_of_its_rows(group, rows, units):
    width = units * 16 // 2
    shape = rows * group.size, width * group.size
    x = jnp.asarray(np.random.default_rng(2).normal(size=shape), "bfloat16")
    got = sharded(group, lambda v: all_to_all_rows(v, "tp", group.number), BY_DEVICE)(x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(x))
    group.check()


@pytest.mark.parametrize(("rows", "units"), [(1, 1), (64, 8), (512, 128), (32768, 128), (33, 5)])
def test_every_device_has_its_columns_of_the_owners_rows(group, rows, units):
    """Rows of a random owner and place; each device has as many of its own as there are in all."""
    rng, width = np.random.default_rng(3), units * 16 // 2
    x = jnp.asarray(rng.normal(size=(rows, width * group.size**2)), "bfloat16")  # columns by device
    owner = rng.integers(0, group.size, rows, np.int32)
    source = rng.integers(0, rows, (rows, group.size), np.int32)

    def body(v):
        mine = jnp.asarray(source)[:, jax.lax.axis_index("tp")]
        return all_to_all_owned(v, mine, jnp.asarray(owner), "tp", group.number)[None]

    got = np.asarray(sharded(group, body, BY_DEVICE)(x))
    parts = np.asarray(x).reshape(rows, group.size, group.size, width)  # by owner and receiver
    for me in range(group.size):
        want = parts[source[np.arange(rows), owner], owner, me]
        np.testing.assert_array_equal(got[me], want)
    group.check()


def test_what_the_kernel_does_not_take_is_declined_by_name(group):
    with pytest.raises(NotImplementedError, match="units of 16 bytes"):
        sharded(group, lambda v: all_gather(v, "tp", group.number))(jnp.zeros((2, 6 * group.size)))
    with pytest.raises(NotImplementedError, match="GatherGroup"):
        all_gather(jnp.zeros((2, 8)), "tp", 0)
    with pytest.raises(ValueError, match="2 to 8 devices"):
        GatherGroup(9)
