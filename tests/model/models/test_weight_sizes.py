"""Sizes of a model's weights: numbers of weights, and bytes as they are stored."""

import jax
from flax import nnx
from support.cases.quantised_checkpoints import LLAMA, maps_of, write_pair

from lora_jax.models import load
from lora_jax.models.weight_sizes import WeightSizes, weight_sizes


def test_quantised_weights_count_as_weights_and_weigh_as_codes(tmp_path):
    folders = write_pair(tmp_path, "nf4", LLAMA)
    models = [load(folder)[0] for folder in folders]
    sizes, plain = (weight_sizes(model) for model in models)
    assert plain == WeightSizes(sizes.parameters, 2 * sizes.parameters)
    maps = sum(rows * columns for rows, columns in maps_of(LLAMA).values())
    assert sizes.quantised_parameters == maps
    assert sizes.quantised_bytes == maps * 9 // 16
    assert sizes.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(models[0])))
    assert sizes.num_bytes == plain.num_bytes - 2 * maps + maps * 9 // 16
