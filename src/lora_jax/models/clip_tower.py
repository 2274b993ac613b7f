"""LLaVA-1.5's tower: CLIP without its last layer, the class row dropped, and a projector."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import WHOLE, LoraModule, NameRule
from lora_jax.config import VisionConfig
from lora_jax.models.sources import WeightRule, weight
from lora_jax.models.vision_names import tower_weights
from lora_jax.nn.adapter_sites import refusal, rule
from lora_jax.nn.layers import LayerNorm, Linear, apply_linears, parameter
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vision import (
    PREFIX,
    AbstractTower,
    TowerInputs,
    at_rows,
    gelu,
    normalised,
    quick_gelu,
    vision_linear,
)
from lora_jax.ops.image_attention import image_attention
from lora_jax.typing import Array, Bool, Float

# The tower's place in checkpoints: transformers 5, the hub.
_TOWERS = ("model.vision_tower", "vision_tower.vision_model", "model.vision_tower.vision_model")
_PROJECTORS = ("model.multi_modal_projector", "multi_modal_projector")
_AT = "(?:model.vision_tower|vision_tower)(?:.vision_model)?"  # in paths of adapters
_PROJECTOR = "(?:model.multi_modal_projector|multi_modal_projector)"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")


class ClipLayer(nnx.Module):
    """x + attention(norm1(x)), then x + fc2(quick_gelu(fc1(norm2(x))))."""

    def __init__(self, config: VisionConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        size, width = config.hidden_size, config.intermediate_size
        self.layer_norm1 = LayerNorm(size, config.norm_eps, dtype=dtype, bias=True)
        self.layer_norm2 = LayerNorm(size, config.norm_eps, dtype=dtype, bias=True)
        kwargs: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.q_proj = vision_linear("self_attn.q_proj", layer, size, size, **kwargs)
        self.k_proj = vision_linear("self_attn.k_proj", layer, size, size, **kwargs)
        self.v_proj = vision_linear("self_attn.v_proj", layer, size, size, **kwargs)
        self.out_proj = vision_linear("self_attn.out_proj", layer, size, size, **kwargs)
        self.fc1 = vision_linear("mlp.fc1", layer, size, width, **kwargs)
        self.fc2 = vision_linear("mlp.fc2", layer, width, size, **kwargs)

    def __call__(
        self, x: Float[Array, "rows hidden"], valid: Bool[Array, "rows"], routing: AdapterRouting
    ) -> Float[Array, "rows hidden"]:
        config = self.config
        maps = (self.q_proj, self.k_proj, self.v_proj)
        heads = (x.shape[0], config.num_heads, config.head_dim)
        parts = apply_linears(maps, self.layer_norm1(x), routing)
        q, k, v = (part.reshape(heads) for part in parts)
        out = image_attention(q, k, v, valid, routing.num_rows, config.head_dim**-0.5, leading=True)
        x = x + self.out_proj(out.reshape(x.shape), routing)
        inner = quick_gelu(self.fc1(self.layer_norm2(x), routing))
        return x + self.fc2(inner, routing)


class ClipTower(AbstractTower):
    """The tower and the projector of LLaVA-1.5."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        size, kwargs = config.hidden_size, {"dtype": dtype, "rngs": rngs}
        self.patch_embedding = Linear(
            config.patch_dim, size, module=None, layer=0, axes=(None, None), **kwargs
        )
        self.class_embedding = parameter(rngs, (size,), (None,), dtype)
        self.positions = parameter(rngs, (config.num_positions, size), (None, None), dtype)
        self.pre_norm = LayerNorm(size, config.norm_eps, dtype=dtype, bias=True)
        self.layers = nnx.List([ClipLayer(config, n, **kwargs) for n in range(config.num_layers)])
        out = config.out_size
        self.linear_1 = vision_linear("projector.linear_1", 0, size, out, **kwargs)
        self.linear_2 = vision_linear("projector.linear_2", 0, out, out, **kwargs)

    def __call__(
        self, inputs: TowerInputs, routing: AdapterRouting
    ) -> Float[Array, "cells parts hidden"]:
        dtype, count = self.positions.dtype, self.config.num_positions
        patches = self.patch_embedding(normalised(self.config, inputs).astype(dtype), routing)
        x = jnp.concatenate([self.class_embedding[...][None], patches]) + self.positions[...]
        valid = jnp.concatenate([jnp.ones(1, bool), inputs.valid])
        rows = at_rows(routing, count, inputs.num_patches + 1)
        x = self.pre_norm(x)
        for layer in self.layers:
            x = layer(x, valid, rows)
        x = x[1:][inputs.cells]
        projected = at_rows(routing, x.shape[0], inputs.num_patches)
        inner = gelu(self.linear_1(x, projected))
        return self.linear_2(inner, projected)[:, None]

    @staticmethod
    def modules(config: VisionConfig) -> list[LoraModule]:
        size, width, out = config.hidden_size, config.intermediate_size, config.out_size
        layers = tuple(range(config.num_layers))
        shapes = [(f"self_attn.{name}", size, size, layers) for name in _ATTENTION]
        shapes += [
            ("mlp.fc1", size, width, layers),
            ("mlp.fc2", width, size, layers),
            ("projector.linear_1", size, out, (0,)),
            ("projector.linear_2", out, out, (0,)),
        ]
        return [LoraModule(PREFIX + name, i, o, at, split=WHOLE) for name, i, o, at in shapes]

    @staticmethod
    def rules(config: VisionConfig) -> tuple[NameRule, ...]:
        inner = (*(f"self_attn.{name}" for name in _ATTENTION), "mlp.fc1", "mlp.fc2")
        at = f"{_AT}.encoder.layers.{{layer}}"
        embeddings = f"{_AT}.embeddings.(?:patch_embedding|position_embedding)"
        return (
            *(rule(f"{at}.{name}", PREFIX + name) for name in inner),
            *(rule(f"{_PROJECTOR}.linear_{n}", f"{PREFIX}projector.linear_{n}") for n in "12"),
            refusal(embeddings, "LoRA on the tower's embeddings is not supported"),
        )

    @staticmethod
    def weight_rules(config: VisionConfig) -> tuple[WeightRule, ...]:
        ours, file = "tower.layers.{layer}", "encoder.layers.{layer}"
        names = {
            "tower.class_embedding": "embeddings.class_embedding",
            "tower.positions": "embeddings.position_embedding.weight",
            "tower.pre_norm.{kind}": "pre_layrnorm.{kind}",
            f"{ours}.{{norm}}.{{kind}}": f"{file}.{{norm}}.{{kind}}",
            f"{ours}.{{map}}_proj.{{kind}}": f"{file}.self_attn.{{map}}_proj.{{kind}}",
            f"{ours}.fc{{map}}.{{kind}}": f"{file}.mlp.fc{{map}}.{{kind}}",
        }
        patches = ("tower.patch_embedding.weight", "embeddings.patch_embedding.weight")
        linear = (f"{at}.linear_{{map}}.{{kind}}" for at in _PROJECTORS)
        return (
            *tower_weights(_TOWERS, names, patches),
            weight("tower.linear_{map}.{kind}", *linear),
        )

    @staticmethod
    def ignored_weights(config: VisionConfig) -> tuple[str, ...]:
        """Return patterns of tensors that LLaVA never reads: the last layer and what follows."""
        at = r"(model\.)?vision_tower\.(vision_model\.)?"
        last = config.num_layers
        parts = (
            rf"encoder\.layers\.{last}\..*",
            r"post_layernorm\..*",
            r"embeddings\.position_ids",
        )
        return tuple(at + part for part in parts)
