"""The chosen experts of a model as they are trained, and the model with them in its place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.finetune.esft_scores import Selection
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.moe import Experts, MoeBlock
from lora_jax.typing import Array, Float

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainedExperts:
    """Whole matrices of one layer's chosen experts, in the order of the selection."""

    gate_proj: Float[Array, "chosen width hidden"]
    up_proj: Float[Array, "chosen width hidden"]
    down_proj: Float[Array, "chosen hidden width"]


EsftParams = dict[int, TrainedExperts]  # by layer; a layer without chosen experts is absent


def chosen_experts(model: AbstractCausalLM, selection: Selection) -> EsftParams:
    """Return the model's own weights of the chosen experts: where training starts.

    Raises ValueError naming a layer without experts or whose experts have biases (ESFT files have
    no place for them), an expert that the model has not, or one that is chosen twice.
    """
    params = {}
    for layer, chosen in selection.items():
        experts = experts_of(model, layer)
        if experts.gate_bias is not None:
            raise ValueError(f"the experts of layer {layer} have biases, which ESFT does not train")
        count = experts.moe.num_experts
        outside = [expert for expert in chosen if not 0 <= expert < count]
        if outside or len(set(chosen)) < len(chosen):
            raise ValueError(f"layer {layer} has experts 0 to {count - 1}, not {list(chosen)}")
        if chosen:
            index = np.asarray(chosen)
            params[layer] = TrainedExperts(
                **{name: getattr(experts, name)[...][index] for name in PROJECTIONS}
            )
    if not params:
        raise ValueError("no expert is chosen: raise top_p, or name experts")
    return params


def with_experts(
    graphdef: Any, state: Any, params: EsftParams, selection: Selection
) -> AbstractCausalLM:
    """Return the model that was split, but with `params` for its chosen experts."""
    flat = dict(nnx.to_flat_state(state))
    for layer, weights in params.items():
        index = jnp.asarray(selection[layer], jnp.int32)
        for name in PROJECTIONS:
            path = ("layers", layer, "mlp", "experts", name)
            stacked, new = flat[path][...], getattr(weights, name)
            flat[path] = flat[path].replace(stacked.at[index].set(new.astype(stacked.dtype)))
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))


def experts_of(model: AbstractCausalLM, layer: int) -> Experts:
    """Return a layer's experts; ValueError when there is no such layer or it has none."""
    if not 0 <= layer < len(model.layers):
        raise ValueError(f"there is no layer {layer}: the model has {len(model.layers)}")
    block = model.layers[layer].mlp
    if not isinstance(block, MoeBlock):
        raise ValueError(f"layer {layer} has no experts")
    return block.experts
