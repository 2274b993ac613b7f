"""All-to-all of columns, rows and owned rows over fake CPU devices: values, bits, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lora_jax.ops.all_to_all import all_to_all, all_to_all_owned, all_to_all_rows

BY_DEVICE = PartitionSpec("tp")


def swapped(devices: int, parts, op=all_to_all, **how):
    """Return what each device has, [devices, rows, columns]; `parts` are of the same shape."""
    mesh = jax.make_mesh((devices,), ("tp",), devices=jax.devices()[:devices])
    body = lambda v: op(v[0], "tp", **how)[None]  # noqa: E731
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


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_device_has_all_columns_of_its_rows(devices, dtype, implementation):
    rng = np.random.default_rng(devices)
    parts = jnp.asarray(rng.normal(size=(devices, 8, 3)), dtype)
    parts = parts.at[0, 0, 0].set(jnp.nan).at[-1, 1, 1].set(-0.0)
    got = swapped(devices, parts, all_to_all_rows, implementation=implementation)
    kind = {2: np.uint16, 4: np.uint32}[parts.dtype.itemsize]
    whole = np.concatenate(np.asarray(parts).view(kind), axis=1)  # the columns of all devices
    np.testing.assert_array_equal(got.reshape(8, -1).view(kind), whole)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 0, 4), "float32", r"shape \(0, 4\)"),
        ((2, 5, 2), "float32", "divide by 2 devices"),
        ((2, 2, 4), "float16", "x float16"),
    ],
)
def test_rows_that_do_not_divide_are_refused(shape, dtype, reason):
    with pytest.raises(ValueError, match=f"all_to_all_rows: .*{reason}"):
        swapped(2, jnp.zeros(shape, dtype), all_to_all_rows)


def owned(devices: int, parts, source, owner, **how):
    """Return what each device has of the owners' rows, [devices, rows, part]."""
    mesh = jax.make_mesh((devices,), ("tp",), devices=jax.devices()[:devices])

    def body(x, source, owner):
        return all_to_all_owned(x[0], source[0], owner, "tp", **how)[None]

    specs = BY_DEVICE, BY_DEVICE, PartitionSpec()
    call = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=BY_DEVICE, check_vma=False)
    arrays = parts, source, owner
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(arrays, specs, strict=True)
    ]
    return np.asarray(jax.jit(call)(*placed))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_device_has_its_columns_of_the_owners_rows(devices, dtype, implementation):
    rng = np.random.default_rng(devices)
    parts = jnp.asarray(rng.normal(size=(devices, 3, 8)), dtype)
    parts = parts.at[0, 0, 0].set(jnp.nan).at[-1, 1, 1].set(-0.0)
    source = rng.integers(0, 3, (devices, 9), np.int32)
    owner = rng.integers(0, devices, 9, np.int32)
    got = owned(devices, parts, source, owner, implementation=implementation)
    kind = {2: np.uint16, 4: np.uint32}[parts.dtype.itemsize]
    rows = np.asarray(parts).view(kind)[owner, source[owner, np.arange(9)]]
    want = np.stack(np.split(rows, devices, axis=1))
    np.testing.assert_array_equal(got.view(kind), want)


@pytest.mark.parametrize(
    ("shape", "places", "dtype", "reason"),
    [
        ((2, 2, 5), (3, 3), "int32", "divide by 2 devices"),
        ((2, 2, 4), (3, 3), "int16", "int16"),
    ],
)
def test_owned_rows_are_refused_by_shape_and_dtype(shape, places, dtype, reason):
    source, owner = np.zeros((2, places[0]), dtype), np.zeros(places[1], dtype)
    with pytest.raises(ValueError, match=f"all_to_all_owned: .*{reason}"):
        owned(2, jnp.zeros(shape), source, owner)
