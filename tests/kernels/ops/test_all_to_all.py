"""all_to_all over four fake CPU devices: values, bits and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lora_jax.ops.all_to_all import all_to_all

BY_DEVICE = PartitionSpec("tp")


def swapped(devices: int, parts, **how):
    """Return what each device has, [devices, rows, columns]; `parts` are of the same shape."""
    mesh = jax.make_mesh((devices,), ("tp",), devices=jax.devices()[:devices])
    body = lambda v: all_to_all(v[0], "tp", **how)[None]  # noqa: E731
    call = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=BY_DEVICE, out_specs=BY_DEVICE, check_vma=False)
    )
    return np.asarray(call(jax.device_put(parts, NamedSharding(mesh, BY_DEVICE))))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_device_has_its_columns_of_all(devices, dtype, implementation):
    rng = np.random.default_rng(devices)
    parts = jnp.asarray(rng.normal(size=(devices, 3, 8)), dtype)
    parts = parts.at[0, 0, 0].set(jnp.nan).at[-1, 1, 1].set(-0.0)
    got = swapped(devices, parts, implementation=implementation)
    width = 8 // devices
    blocks = np.asarray(parts).reshape(devices, 3, devices, width)
    kind = {2: np.uint16, 4: np.uint32}[parts.dtype.itemsize]
    for me in range(devices):
        want = blocks[:, :, me].transpose(1, 0, 2).reshape(3, 8)
        np.testing.assert_array_equal(got[me].view(kind), want.view(kind))


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 0, 4), "float32", r"shape \(0, 4\)"),
        ((2, 2, 5), "float32", "divide by 2 devices"),
        ((2, 2, 4), "float16", "x float16"),
    ],
)
def test_other_arrays_are_refused_with_their_shape_or_dtype(shape, dtype, reason):
    with pytest.raises(ValueError, match=f"all_to_all: .*{reason}"):
        swapped(2, jnp.zeros(shape, dtype))
