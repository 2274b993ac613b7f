"""all_gather over four fake CPU devices: values, bits and refusals."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from cuda_backend import all_gather as cuda
from lora_jax.ops import all_gather as package
from lora_jax.ops import dispatch
from lora_jax.ops.all_gather import all_gather, open_group


def sharded(devices: int, body):
    """Return a jitted call of `body` on the columns of each device; its result is whole."""
    mesh = jax.make_mesh((devices,), ("tp",), devices=jax.devices()[:devices])
    columns = PartitionSpec(None, "tp")
    call = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=columns, out_specs=PartitionSpec(), check_vma=False)
    )
    return lambda x: call(jax.device_put(x, NamedSharding(mesh, columns)))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_device_has_all_columns_in_mesh_order(devices, dtype, implementation):
    rng = np.random.default_rng(devices)
    x = jnp.asarray(rng.normal(size=(3, 8)), dtype)
    x = x.at[0, 0].set(jnp.nan).at[1, 1].set(-0.0)
    got = sharded(devices, lambda v: all_gather(v, "tp", implementation=implementation))(x)
    kind = {2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(got).view(kind), np.asarray(x).view(kind))


def test_a_group_is_opened_only_on_gpus_and_its_lack_is_no_error(monkeypatch, caplog):
    assert open_group(2) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    group = SimpleNamespace(number=42, check=lambda: None)
    opened = {"gather_group": lambda devices: group}
    monkeypatch.setattr(dispatch, "_backend_ops", lambda name: opened)
    assert open_group(2) is group

    def without(devices):
        raise ValueError(f"GPU 0 cannot reach another of {devices}")

    opened["gather_group"] = without
    with caplog.at_level("WARNING", logger=package.__name__):
        assert open_group(2) is None
    assert "GPU 0 cannot reach" in caplog.text


def test_a_group_that_has_lost_a_gpu_is_not_opened_again(monkeypatch):
    def check():
        raise cuda.PeerLost("GPU 0 got no answer from GPU 1")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(cuda._GROUPS, 2, SimpleNamespace(number=1, check=check))
    with pytest.raises(cuda.PeerLost, match="no answer"):
        open_group(2)


@pytest.mark.parametrize(
    ("x", "reason"),
    [(jnp.zeros((0, 4)), r"shape \(0, 4\)"), (jnp.zeros((2, 4), jnp.float16), "x float16")],
)
def test_other_arrays_are_refused_with_their_shape_or_dtype(x, reason):
    with pytest.raises(ValueError, match=f"all_gather: .*{reason}"):
        all_gather(x, "tp")
