"""Mixtral against transformers."""

import numpy as np
import pytest
import transformers
from support.contracts.model_contract import Case, ModelContract, make_case, shaken
from support.drivers.model_driver import TINY, WIDTH, fuse_experts, old_keys


def make_mixtral() -> transformers.MixtralForCausalLM:
    transformers.set_seed(0)
    sizes = {"intermediate_size": WIDTH, "num_local_experts": 5, "num_experts_per_tok": 2}
    return shaken(transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, **sizes)))


def as_in_memory(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The other spelling: `mlp` instead of `block_sparse_moe`, experts fused."""
    parent = "model.layers.{layer}.block_sparse_moe.experts"
    fused = fuse_experts(tensors, ("w1", "w3", "w2"), parent)
    return {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in fused.items()}


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    tmp = tmp_path_factory.mktemp("mixtral")
    return make_case(tmp, make_mixtral(), as_in_memory, old_keys)


class TestMixtral(ModelContract):
    """Normalised weights of the best two of five experts."""
