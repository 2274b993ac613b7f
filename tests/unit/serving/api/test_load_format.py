"""Load formats: files of a checkpoint, or random weights from configs alone."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from serving.api.config import LOAD_FORMATS
from serving.api.load_format import weight_source

SHAPE = TinyShape(max_positions=32, hidden=32, width=48, layers=1)


@pytest.mark.parametrize("load_format", LOAD_FORMATS)
def test_a_model_has_the_dtype_that_is_said_before_it_is_loaded(load_format, tmp_path):
    tiny_checkpoint.write_model(tmp_path, SHAPE)
    source = weight_source(load_format)
    assert source.made_up == (load_format == "dummy")
    model, config = source.load_model(tmp_path)
    leaves = jax.tree.leaves(nnx.state(model.embed))
    assert {leaf.dtype for leaf in leaves} == {source.model_dtype(config, tmp_path)}


def test_made_up_weights_need_a_config_alone(tmp_path):
    tiny_checkpoint.write_model(tmp_path, SHAPE)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    model, config = weight_source("dummy").load_model(tmp_path, dtype=jnp.float32)
    assert jnp.isfinite(model.embed.weight.get_value()).all()
    assert weight_source("dummy").model_dtype(config, tmp_path) == jnp.float32
    with pytest.raises(ValueError, match="safetensors"):
        weight_source("auto").load_model(tmp_path)
