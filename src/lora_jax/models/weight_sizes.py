"""Number and bytes of a loaded model's weights, and of those that are quantised."""

import dataclasses
import math

import jax
from flax import nnx

from lora_jax.ops.grouped_matmul import QUANTISED


@dataclasses.dataclass(frozen=True)
class WeightSizes:
    """Of all weights of a model, the quantised ones among them."""

    parameters: int
    num_bytes: int
    quantised_parameters: int = 0
    quantised_bytes: int = 0


def weight_sizes(model: nnx.Module) -> WeightSizes:
    """Return the sizes of a model's weights, of codes, scales and zero points as they lie."""
    weights = jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, QUANTISED))
    quantised = [w for w in weights if isinstance(w, QUANTISED)]
    return WeightSizes(
        sum(math.prod(w.shape) for w in weights),
        sum(leaf.nbytes for leaf in jax.tree.leaves(weights)),
        sum(math.prod(w.shape) for w in quantised),
        sum(leaf.nbytes for leaf in jax.tree.leaves(quantised)),
    )
