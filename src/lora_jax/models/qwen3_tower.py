"""Qwen3-VL's tower: patches of 16, learned and axial positions, mergers, deepstack."""

import jax.numpy as jnp
from flax import nnx

from lora_jax.adapters.catalogue import WHOLE, LoraModule, NameRule
from lora_jax.config import VisionConfig
from lora_jax.models.sources import WeightRule
from lora_jax.models.vision_names import tower_weights
from lora_jax.nn.adapter_sites import refusal, rule
from lora_jax.nn.layers import LayerNorm, Linear, parameter
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vision import (
    PREFIX,
    AbstractTower,
    TowerInputs,
    VisionAttention,
    at_rows,
    axial_cos_sin,
    gelu,
    mapped,
    normalised,
    vision_linear,
)
from lora_jax.typing import Array, Float

_AT = "(?:model.visual|visual)"  # in paths of adapters
_PLACES = ("model.visual", "visual")  # in checkpoints


class Qwen3Block(nnx.Module):
    """x + attn(norm1(x)), then x + fc2(gelu(fc1(norm2(x))))."""

    def __init__(self, config: VisionConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        size, width, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.norm1 = LayerNorm(size, eps, dtype=dtype, bias=True)
        self.norm2 = LayerNorm(size, eps, dtype=dtype, bias=True)
        self.attn = VisionAttention(config, layer, dtype=dtype, rngs=rngs)
        options = {"dtype": dtype, "rngs": rngs}
        self.linear_fc1 = vision_linear("mlp.linear_fc1", layer, size, width, **options)
        self.linear_fc2 = vision_linear("mlp.linear_fc2", layer, width, size, **options)

    def __call__(
        self,
        x: Float[Array, "patches hidden"],
        angles: tuple[Float[Array, "patches half"], Float[Array, "patches half"]],
        inputs: TowerInputs,
        routing: AdapterRouting,
    ) -> Float[Array, "patches hidden"]:
        x = self.attn(self.norm1(x), angles, inputs, routing, addend=x)
        inner = mapped(self.linear_fc1, self.norm2(x), routing, gelu=True)
        return mapped(self.linear_fc2, inner, routing, addend=x)


class Qwen3Merger(nnx.Module):
    """Four patches to one row: norm (before or after they stand side by side), fc1, gelu, fc2."""

    def __init__(
        self,
        config: VisionConfig,
        module: str,
        layer: int,
        *,
        norm_merged: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.merged_size, self.norm_merged = config.merged_size, norm_merged
        size = config.merged_size if norm_merged else config.hidden_size
        self.norm = LayerNorm(size, config.norm_eps, dtype=dtype, bias=True)
        options, size = {"dtype": dtype, "rngs": rngs}, config.merged_size
        self.linear_fc1 = vision_linear(f"{module}.linear_fc1", layer, size, size, **options)
        self.linear_fc2 = vision_linear(
            f"{module}.linear_fc2", layer, size, config.out_size, **options
        )

    def __call__(
        self, x: Float[Array, "patches hidden"], routing: AdapterRouting
    ) -> Float[Array, "cells out"]:
        if self.norm_merged:
            x = self.norm(x.reshape(-1, self.merged_size))
        else:
            x = self.norm(x).reshape(-1, self.merged_size)
        return mapped(self.linear_fc2, gelu(mapped(self.linear_fc1, x, routing)), routing)


class Qwen3Tower(AbstractTower):
    """The tower of Qwen3-VL, dense and MoE."""

    takes_several = True

    def __init__(self, config: VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        options = {"dtype": dtype, "rngs": rngs}
        self.patch_embed = Linear(
            config.patch_dim,
            config.hidden_size,
            module=None,
            layer=0,
            axes=(None, None),
            bias=True,
            **options,
        )
        shape = (config.num_positions, config.hidden_size)
        self.positions = parameter(rngs, shape, (None, None), dtype)
        self.blocks = nnx.List([Qwen3Block(config, n, **options) for n in range(config.num_layers)])
        self.merger = Qwen3Merger(config, "merger", 0, norm_merged=False, **options)
        name = "deepstack_merger_list"
        self.deepstack = nnx.List(
            Qwen3Merger(config, name, n, norm_merged=True, **options)
            for n in range(len(config.deepstack))
        )

    def __call__(
        self, inputs: TowerInputs, routing: AdapterRouting
    ) -> Float[Array, "cells parts hidden"]:
        num_cells = inputs.num_patches // self.unit
        merged = at_rows(routing, inputs.cells.shape[0], num_cells, inputs.images)
        pixels = normalised(self.config, inputs).astype(self.positions.dtype)
        learned = self._resampled(inputs).astype(pixels.dtype)
        x = mapped(self.patch_embed, pixels, routing, addend=learned)
        angles, later = axial_cos_sin(self.config, inputs.positions), []
        for layer, block in enumerate(self.blocks):
            x = block(x, angles, inputs, routing)
            if layer in self.config.deepstack:
                merger = self.deepstack[self.config.deepstack.index(layer)]
                later.append(merger(x, merged))
        rows = jnp.stack([self.merger(x, merged), *later], axis=1)
        return rows[inputs.cells]

    @property
    def unit(self) -> int:
        """Patches of one row."""
        return self.config.merge_size**2

    def _resampled(self, inputs: TowerInputs) -> Float[Array, "patches hidden"]:
        """Return each patch's learned position, bilinear between four, in float32."""
        taps = [
            self.positions[...][inputs.table_rows[:, n]].astype(jnp.float32)
            * inputs.table_weights[:, n, None]
            for n in range(4)
        ]
        return ((taps[0] + taps[1]) + taps[2]) + taps[3]

    @staticmethod
    def modules(config: VisionConfig) -> list[LoraModule]:
        size, width, merged = config.hidden_size, config.intermediate_size, config.merged_size
        blocks, mergers = tuple(range(config.num_layers)), tuple(range(len(config.deepstack)))
        shapes = [
            ("attn.qkv", size, 3 * size, blocks),
            ("attn.proj", size, size, blocks),
            ("mlp.linear_fc1", size, width, blocks),
            ("mlp.linear_fc2", width, size, blocks),
            ("merger.linear_fc1", merged, merged, (0,)),
            ("merger.linear_fc2", merged, config.out_size, (0,)),
            ("deepstack_merger_list.linear_fc1", merged, merged, mergers),
            ("deepstack_merger_list.linear_fc2", merged, config.out_size, mergers),
        ]
        return [LoraModule(PREFIX + name, i, o, at, split=WHOLE) for name, i, o, at in shapes if at]

    @staticmethod
    def rules(config: VisionConfig) -> tuple[NameRule, ...]:
        inner = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
        rules = [rule(f"{_AT}.blocks.{{layer}}.{name}", PREFIX + name) for name in inner]
        for name in ("linear_fc1", "linear_fc2"):
            rules.append(rule(f"{_AT}.merger.{name}", f"{PREFIX}merger.{name}"))
            if config.deepstack:
                deep = "deepstack_merger_list"
                rules.append(rule(f"{_AT}.{deep}.{{layer}}.{name}", f"{PREFIX}{deep}.{name}"))
        return (
            *rules,
            refusal(f"{_AT}.patch_embed.proj", "LoRA on the patches' embedding is not supported"),
            refusal(f"{_AT}.pos_embed", "LoRA on learned positions is not supported"),
        )

    @staticmethod
    def weight_rules(config: VisionConfig) -> tuple[WeightRule, ...]:
        ours, deep = "tower.blocks.{layer}", "deepstack_merger_list.{layer}"
        names = {
            "tower.positions": "pos_embed.weight",
            f"{ours}.{{norm}}.{{kind}}": "blocks.{layer}.{norm}.{kind}",
            f"{ours}.attn.{{map}}.{{kind}}": "blocks.{layer}.attn.{map}.{kind}",
            f"{ours}.linear_{{map}}.{{kind}}": "blocks.{layer}.mlp.linear_{map}.{kind}",
            "tower.merger.{map}.{kind}": "merger.{map}.{kind}",
            "tower.deepstack.{layer}.{map}.{kind}": f"{deep}.{{map}}.{{kind}}",
            "tower.patch_embed.bias": "patch_embed.proj.bias",
        }
        patches = ("tower.patch_embed.weight", "patch_embed.proj.weight")
        return tower_weights(_PLACES, names, patches)
