"""Random weights from a config alone: shapes as loaded, values that keep activations in size."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.cases import tiny_esft

from lora_jax.models import load, make_dummy
from serving import Engine, Sampling


def named(model) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.split(model, graph=False)[1])
    return {".".join(map(str, path)): param[...] for path, param in flat}


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v2"])
def folders(request, tmp_path_factory):
    """A checkpoint, and a folder with its config.json alone."""
    root = tmp_path_factory.mktemp(request.param)
    base, bare = tiny_esft.write_moe(root / "base", request.param), root / "bare"
    bare.mkdir()
    shutil.copy(base / "config.json", bare)
    return base, bare


def test_weights_are_shaped_as_loaded_ones_and_of_their_scale(folders):
    base, bare = folders
    model, config = make_dummy(bare)
    wanted, got = named(load(base)[0]), named(model)
    assert config == load(base)[1]
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        want = wanted[name]
        assert (value.shape, value.dtype, value.sharding) == (want.shape, want.dtype, want.sharding)
        if value.ndim == 1:
            np.testing.assert_array_equal(value, np.ones(value.shape))
        else:
            assert 0.8 < float(jnp.std(value)) * value.shape[-1] ** 0.5 < 1.2, name
    again = named(make_dummy(bare)[0])
    assert all((again[name] == value).all() for name, value in got.items())
    gates = [value for name, value in got.items() if name.endswith("gate_proj")]
    assert (gates[0] != gates[1]).any()


def test_dtype_is_the_config_s_or_the_caller_s(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    raw = json.loads((base / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    narrow = named(make_dummy(tmp_path)[0])
    assert narrow["embed.weight"].dtype == jnp.bfloat16
    routers = [value for name, value in narrow.items() if name.endswith("router.weight")]
    assert routers
    for router in routers:
        assert router.dtype == jnp.float32
        np.testing.assert_array_equal(router, router.astype(jnp.bfloat16).astype(jnp.float32))
    assert named(make_dummy(tmp_path, dtype="float32")[0])["embed.weight"].dtype == jnp.float32
    with pytest.raises(ValueError, match="float16 is not supported"):
        make_dummy(tmp_path, dtype="float16")


@pytest.mark.long
def test_an_engine_needs_nothing_but_the_config(folders):
    _, bare = folders
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)
    sizes = {
        "structured_outputs": False,
        "max_model_len": 32,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
    }
    with Engine(bare, **sizes, load_format="dummy", max_esft_adapters=0) as engine:
        first, second = engine.generate(["ab", "cd"], None, sampling)
    assert len(first.outputs[0].token_ids) == 4
    assert first.outputs[0].token_ids != second.outputs[0].token_ids
    with pytest.raises(ValueError, match="bare has no tokenizer"):
        Engine(bare, **sizes)
