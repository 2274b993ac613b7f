"""The split of a model: which axis of a weight lies on which device."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from lora_jax.sharding import AXIS, Split, has_split_inputs, make_mesh, put, weight_sharding


def test_mesh_of_the_first_devices_or_of_given_ones():
    mesh = make_mesh(2)
    assert dict(mesh.shape) == {AXIS: 2}
    assert list(mesh.devices.flat) == jax.devices()[:2]
    assert list(make_mesh(2, jax.devices()[2:]).devices.flat) == jax.devices()[2:4]


def test_too_few_devices():
    with pytest.raises(ValueError, match="over 8 devices: there are 4"):
        make_mesh(8)


def test_without_a_split_the_first_device():
    sharding = weight_sharding(("vocab", "embed"), (8, 4), None)
    assert sharding == SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize("experts", ["ep", "tp"])
@pytest.mark.parametrize(
    ("axes", "place"),
    [
        (("vocab", "embed"), 0),
        (("heads", "embed"), 0),
        (("heads",), 0),
        (("kv_heads", "embed"), 0),
        (("attended", "heads"), 0),  # along its outputs: inputs are gathered
        (("embed", "mlp"), 0),
        (("embed",), 0),  # their bias
        (("heads", None, None), 0),
        (("heads", "latent"), 0),
        (("latent", "embed"), None),
        (("latent",), None),
        ((None, "embed"), None),  # the router
        ((None,), None),  # a norm
    ],
)
def test_linear_maps_are_split_along_their_outputs(axes, place, experts):
    split = Split(make_mesh(2), experts)
    want = [AXIS if i == place else None for i in range(len(axes))]
    assert split.spec(axes) == PartitionSpec(*(want if place is not None else ()))
    sharding = weight_sharding(axes, (4,) * len(axes), split)
    assert (sharding.spec, sharding.mesh) == (split.spec(axes), split.mesh)


@pytest.mark.parametrize("axes", [("experts", "mlp", "embed"), ("experts", "embed", "mlp")])
def test_experts_are_split_by_number_or_along_their_outputs(axes):
    mesh = make_mesh(2)
    assert Split(mesh, "ep").spec(axes) == PartitionSpec(AXIS, None, None)
    assert Split(mesh, "tp").spec(axes) == PartitionSpec(None, AXIS, None)
    assert Split(mesh, "tp").spec(axes[:2]) == PartitionSpec(None, AXIS)  # a bias


def test_only_o_and_down_take_the_split_outputs_of_another_map():
    assert has_split_inputs(("attended", "heads"))
    assert has_split_inputs(("embed", "mlp"))
    for axes in (("heads", "embed"), ("vocab", "embed"), ("heads", "latent"), ("embed",)):
        assert not has_split_inputs(axes)


def test_the_output_of_attention_lies_in_parts_or_whole():
    mesh, axes = make_mesh(2), ("attended", "heads")
    parts, whole = Split(mesh), Split(mesh, attention_output="whole")
    assert parts.spec(axes) == PartitionSpec(AXIS, None)
    assert parts.spec(axes[:1]) == PartitionSpec(AXIS)  # a bias
    assert whole.spec(axes) == whole.spec(axes[:1]) == PartitionSpec()
    assert whole.has_whole(axes)
    assert not whole.has_whole(("embed", "mlp"))
    assert not parts.has_whole(axes)
    with pytest.raises(ValueError, match=r"attention_output is one of .*'half'"):
        Split(mesh, attention_output="half")


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="'kv_heads' of size 6 does not divide among 4 devices"):
        weight_sharding(("kv_heads", "embed"), (6, 8), Split(make_mesh(4)))


def test_what_is_wrong_is_named():
    split = Split(make_mesh(2))
    with pytest.raises(ValueError, match="'colour' of"):
        weight_sharding(("colour",), (4,), split)
    with pytest.raises(ValueError, match="do not fit shape"):
        weight_sharding(("heads",), (4, 4), split)
    with pytest.raises(ValueError, match="'pp'"):
        Split(make_mesh(2), "pp")


def test_of_several_processes_each_puts_its_own_part(monkeypatch):
    """jax.device_put would compare the values among all processes."""
    mesh = make_mesh(2)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    monkeypatch.setattr(NamedSharding, "is_fully_addressable", property(lambda self: False))
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.arange(4)]}
    placed = put(values, sharding)
    monkeypatch.undo()
    assert jax.tree.structure(placed) == jax.tree.structure(values)
    for got, want in zip(jax.tree.leaves(placed), jax.tree.leaves(values), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)
        assert [len(shard.data) for shard in got.addressable_shards] == [len(want) // 2] * 2
