"""The mesh and the table of logical axes."""

import jax
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

from lora_jax.sharding import make_mesh, weight_sharding


def test_mesh_axes_and_devices():
    mesh = make_mesh(ep=2, tp=2)
    assert dict(mesh.shape) == {"pp": 1, "ep": 2, "tp": 2}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_mesh_on_given_devices():
    assert list(make_mesh(tp=2, devices=jax.devices()[2:]).devices.flat) == jax.devices()[2:4]


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"pp 2 x ep 4 x tp 1 needs 8 devices, there are 4"):
        make_mesh(pp=2, ep=4)


def test_without_a_mesh_the_first_device():
    sharding = weight_sharding(("vocab", "embed"), (8, 4), None)
    assert sharding == SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("heads", "embed"), (8, 6), ("tp", None)),
        (("embed", "heads"), (6, 8), (None, "tp")),
        (("experts", "mlp", "embed"), (4, 8, 6), ("ep", "tp", None)),
        ((None,), (5,), (None,)),
    ],
)
def test_logical_axes(axes, shape, spec):
    mesh = make_mesh(ep=2, tp=2)
    sharding = weight_sharding(axes, shape, mesh)
    assert sharding.spec == PartitionSpec(*spec)
    assert sharding.mesh == mesh


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="'kv_heads' of size 6 does not divide among 4 devices"):
        weight_sharding(("kv_heads", "embed"), (6, 8), make_mesh(tp=4))


def test_axes_that_are_wrong():
    mesh = make_mesh(tp=2)
    with pytest.raises(ValueError, match="'colour' of shape"):
        weight_sharding(("colour",), (4,), mesh)
    with pytest.raises(ValueError, match="do not fit shape"):
        weight_sharding(("heads",), (4, 4), mesh)
