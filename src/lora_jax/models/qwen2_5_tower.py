"""Qwen2.5-VL's tower: patches of 14, windows in most layers, gated MLPs, one merger.

Patches stand window by window, windows at the edge filled up, so that a window is a fixed run.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import WHOLE, LoraModule, NameRule
from lora_jax.config import VisionConfig
from lora_jax.models.sources import WeightRule
from lora_jax.models.vision_names import tower_weights
from lora_jax.nn.adapter_sites import refusal, rule
from lora_jax.nn.layers import Linear, RMSNorm, apply_linears
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vision import (
    PREFIX,
    AbstractTower,
    TowerInputs,
    VisionAttention,
    at_rows,
    axial_cos_sin,
    gelu,
    normalised,
    vision_linear,
)
from lora_jax.ops.grouped_matmul import silu_times
from lora_jax.typing import Array, Float

_AT = "(?:model.visual|visual)"  # in paths of adapters
_PLACES = ("model.visual", "visual")  # in checkpoints
_MLP = ("gate_proj", "up_proj", "down_proj")


class Qwen25Block(nnx.Module):
    """x + attn(norm1(x)), then x + down(silu(gate) * up) of norm2(x)."""

    def __init__(self, config: VisionConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, width = config.hidden_size, config.intermediate_size
        kwargs: dict[str, Any] = {"dtype": dtype}
        self.norm1 = RMSNorm(size, config.norm_eps, **kwargs)
        self.norm2 = RMSNorm(size, config.norm_eps, **kwargs)
        kwargs |= {"rngs": rngs}
        self.attn = VisionAttention(config, layer, **kwargs)
        self.gate_proj = vision_linear("mlp.gate_proj", layer, size, width, **kwargs)
        self.up_proj = vision_linear("mlp.up_proj", layer, size, width, **kwargs)
        self.down_proj = vision_linear("mlp.down_proj", layer, width, size, **kwargs)

    def __call__(
        self,
        x: Float[Array, "patches hidden"],
        angles: tuple[Float[Array, "patches half"], Float[Array, "patches half"]],
        inputs: TowerInputs,
        routing: AdapterRouting,
        window: int,
    ) -> Float[Array, "patches hidden"]:
        x = self.attn(self.norm1(x), angles, inputs, routing, window, addend=x)
        gate, up = apply_linears((self.gate_proj, self.up_proj), self.norm2(x), routing)
        return x + self.down_proj(silu_times(gate, up), routing)


class Qwen25Merger(nnx.Module):
    """Four patches to one row: norm, then two maps with gelu between."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.merged_size = size = config.merged_size
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.ln_q = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.mlp_0 = vision_linear("merger.mlp.0", 0, size, size, **kwargs)
        self.mlp_2 = vision_linear("merger.mlp.2", 0, size, config.out_size, **kwargs)

    def __call__(
        self, x: Float[Array, "patches hidden"], routing: AdapterRouting
    ) -> Float[Array, "cells out"]:
        x = self.ln_q(x).reshape(-1, self.merged_size)
        return self.mlp_2(gelu(self.mlp_0(x, routing)), routing)


class Qwen25Tower(AbstractTower):
    """The tower of Qwen2.5-VL."""

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        kwargs = {"dtype": dtype, "rngs": rngs}
        self.patch_embed = Linear(
            config.patch_dim, config.hidden_size, module=None, layer=0, axes=(None, None), **kwargs
        )
        self.blocks = nnx.List([Qwen25Block(config, n, **kwargs) for n in range(config.num_layers)])
        self.merger = Qwen25Merger(config, **kwargs)

    def __call__(
        self, inputs: TowerInputs, routing: AdapterRouting
    ) -> Float[Array, "cells parts hidden"]:
        config, unit = self.config, self.config.merge_size**2
        merged = at_rows(routing, inputs.cells.shape[0], inputs.num_patches // unit)
        pixels = normalised(config, inputs).astype(self.patch_embed.weight.dtype)
        x, angles = self.patch_embed(pixels, routing), axial_cos_sin(config, inputs.positions)
        side = config.window_size // config.patch_size // config.merge_size * config.merge_size
        for layer, block in enumerate(self.blocks):
            window = 0 if layer in config.full_layers else side * side
            x = block(x, angles, inputs, routing, window)
        return self.merger(x, merged)[inputs.cells][:, None]

    @staticmethod
    def modules(config: VisionConfig) -> list[LoraModule]:
        size, width, merged = config.hidden_size, config.intermediate_size, config.merged_size
        blocks = tuple(range(config.num_layers))
        shapes = [
            ("attn.qkv", size, 3 * size, blocks),
            ("attn.proj", size, size, blocks),
            ("mlp.gate_proj", size, width, blocks),
            ("mlp.up_proj", size, width, blocks),
            ("mlp.down_proj", width, size, blocks),
            ("merger.mlp.0", merged, merged, (0,)),
            ("merger.mlp.2", merged, config.out_size, (0,)),
        ]
        return [LoraModule(PREFIX + name, i, o, at, split=WHOLE) for name, i, o, at in shapes]

    @staticmethod
    def rules(config: VisionConfig) -> tuple[NameRule, ...]:
        inner = ("attn.qkv", "attn.proj", *(f"mlp.{name}" for name in _MLP))
        return (
            *(rule(f"{_AT}.blocks.{{layer}}.{name}", PREFIX + name) for name in inner),
            *(rule(f"{_AT}.merger.mlp.{n}", f"{PREFIX}merger.mlp.{n}") for n in "02"),
            refusal(f"{_AT}.patch_embed.proj", "LoRA on the patches' embedding is not supported"),
        )

    @staticmethod
    def weight_rules(config: VisionConfig) -> tuple[WeightRule, ...]:
        ours = "tower.blocks.{layer}"
        names = {
            f"{ours}.{{norm}}.weight": "blocks.{layer}.{norm}.weight",
            f"{ours}.attn.{{map}}.{{kind}}": "blocks.{layer}.attn.{map}.{kind}",
            f"{ours}.{{map}}_proj.{{kind}}": "blocks.{layer}.mlp.{map}_proj.{kind}",
            "tower.merger.ln_q.weight": "merger.ln_q.weight",
            "tower.merger.mlp_0.{kind}": "merger.mlp.0.{kind}",
            "tower.merger.mlp_2.{kind}": "merger.mlp.2.{kind}",
        }
        patches = ("tower.patch_embed.weight", "patch_embed.proj.weight")
        return tower_weights(_PLACES, names, patches)
