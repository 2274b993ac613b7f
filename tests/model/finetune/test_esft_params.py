"""The chosen experts are the model's own at first, and replacing them replaces nothing else."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from support.cases.finetune_cases import CONFIG

from lora_jax.config import from_hf
from lora_jax.finetune.assets.pretrain import qwen3_moe_tensors
from lora_jax.finetune.esft_params import chosen_experts, with_experts
from lora_jax.models import build

SELECTION = {0: (3, 1), 1: (2,)}


@pytest.fixture(scope="module")
def model():
    return build(from_hf(CONFIG))


def tensors(model) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in qwen3_moe_tensors(model).items()}


def test_training_starts_at_the_models_own_weights(model):
    params, own = chosen_experts(model, SELECTION), tensors(model)
    assert list(params) == [0, 1]
    for layer, experts in SELECTION.items():
        for place, expert in enumerate(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                want = own[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
                np.testing.assert_array_equal(getattr(params[layer], name)[place], want)


def test_only_the_chosen_experts_are_replaced(model):
    before = tensors(model)
    params = jax.tree.map(lambda x: x + 1, chosen_experts(model, SELECTION))
    graphdef, state = nnx.split(model, graph=False)
    after = tensors(with_experts(graphdef, state, params, SELECTION))
    chosen = tuple(f"layers.{n}.mlp.experts.{e}." for n, ids in SELECTION.items() for e in ids)
    for name, value in before.items():
        if any(part in name for part in chosen):
            np.testing.assert_array_equal(after[name], value + 1, err_msg=name)
        else:
            np.testing.assert_array_equal(after[name], value, err_msg=name)
        np.testing.assert_array_equal(tensors(model)[name], value)


def test_a_layer_without_chosen_experts_is_left_out(model):
    assert list(chosen_experts(model, {0: (), 1: (0,)})) == [1]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({2: (0,)}, "no layer 2: the model has 2"),
        ({0: (4,)}, r"layer 0 has experts 0 to 3, not \[4\]"),
        ({0: (1, 1)}, r"not \[1, 1\]"),
        ({0: ()}, "no expert is chosen: raise top_p"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(model, selection, message):
    with pytest.raises(ValueError, match=message):
        chosen_experts(model, selection)


def test_experts_with_biases_are_refused():
    plain = from_hf(CONFIG)
    biased = dataclasses.replace(plain, moe=dataclasses.replace(plain.moe, bias=True))
    with pytest.raises(ValueError, match="experts of layer 0 have biases"):
        chosen_experts(build(biased), {0: (1,)})


def test_a_dense_layer_is_refused():
    with pytest.raises(ValueError, match="layer 1 has no experts"):
        chosen_experts(build(from_hf(CONFIG | {"mlp_only_layers": [1]})), {1: (0,)})
