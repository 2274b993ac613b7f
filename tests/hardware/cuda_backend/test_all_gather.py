"""The all-gather between real GPUs of one process (test_emulated_gather: the same on a CPU)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cuda_backend.all_gather import GatherGroup, all_gather, all_to_all
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


def test_what_the_kernel_does_not_take_is_declined_by_name(group):
    with pytest.raises(NotImplementedError, match="units of 16 bytes"):
        sharded(group, lambda v: all_gather(v, "tp", group.number))(jnp.zeros((2, 6 * group.size)))
    with pytest.raises(NotImplementedError, match="GatherGroup"):
        all_gather(jnp.zeros((2, 8)), "tp", 0)
    with pytest.raises(ValueError, match="2 to 8 devices"):
        GatherGroup(9)
