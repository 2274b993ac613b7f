"""The tower of Qwen3-VL with a gradient: many images of one size, dense, on the served modules."""

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.config import VisionConfig
from lora_jax.finetune.attention import linear
from lora_jax.finetune.lora_params import LoraDelta
from lora_jax.models.qwen3_tower import Qwen3Block, Qwen3Merger, Qwen3Tower
from lora_jax.nn.vision import axial_cos_sin, gelu
from lora_jax.ops.grouped_matmul import gelu_tanh
from lora_jax.ops.rotary import rotate
from lora_jax.typing import Array, Float, Shaped
from lora_jax.vision.layout import block_positions, table_taps


def tower_rows(
    tower: Qwen3Tower,
    pixels: Shaped[Array, "images patches patch_pixels"],
    values: Float[Array, "3 256"],
    grid: tuple[int, int],
    lora: LoraDelta | None = None,
) -> Float[Array, "image_cells parts hidden"]:
    """Return the rows of every image, one image after the other, as the served tower does.

    `pixels` are uint8 as `Patches` has them, `values` what each becomes. Raises ValueError for
    another tower.
    """
    if not isinstance(tower, Qwen3Tower):
        raise ValueError(f"training does not support {type(tower).__name__}")
    config, count = tower.config, pixels.shape[0]
    positions = block_positions(grid, config.merge_size)
    taps, weights = table_taps(positions, grid, round(config.num_positions**0.5))
    table = tower.positions[...]
    learned = jnp.einsum("pt,ptd->pd", jnp.asarray(weights), table[jnp.asarray(taps)])
    x = linear(tower.patch_embed, _patches(pixels, values, config), lora)
    x = x + jnp.tile(learned, (count, 1))
    angles = tuple(jnp.tile(a, (count, 1)) for a in axial_cos_sin(config, jnp.asarray(positions)))
    parts = []
    for number, block in enumerate(tower.blocks):
        x = _block(block, x, angles, count, lora)
        if number in config.deepstack:
            parts.append(_merged(tower.deepstack[config.deepstack.index(number)], x, lora))
    return jnp.stack([_merged(tower.merger, x, lora), *parts], axis=1)


def _patches(
    pixels: Shaped[Array, "images patches patch_pixels"],
    values: Float[Array, "3 256"],
    config: VisionConfig,
) -> Float[Array, "rows patch_dim"]:
    cut = pixels.reshape(-1, 3, pixels.shape[2] // 3).astype(jnp.int32)
    seen = values[jnp.arange(3, dtype=jnp.int32)[None, :, None], cut]
    shape = (*seen.shape[:2], config.temporal_patch_size, seen.shape[2])
    return jnp.broadcast_to(seen[:, :, None], shape).reshape(len(cut), -1)


def _block(
    block: Qwen3Block,
    x: Float[Array, "rows hidden"],
    angles: tuple[Array, ...],
    count: int,
    lora: LoraDelta | None,
) -> Float[Array, "rows hidden"]:
    config = block.attn.config
    heads = (x.shape[0], 3, config.num_heads, config.head_dim)
    q, k, v = linear(block.attn.qkv, block.norm1(x), lora).reshape(heads).transpose(1, 0, 2, 3)
    per_image = (count, -1, *heads[2:])
    q, k = (rotate(y, *angles).reshape(per_image) for y in (q, k))
    scores = jnp.einsum("iqhd,ikhd->ihqk", q, k) * np.float32(config.head_dim**-0.5)
    mixed = jnp.einsum("ihqk,ikhd->iqhd", jax.nn.softmax(scores, axis=-1), v.reshape(per_image))
    x = x + linear(block.attn.proj, mixed.reshape(x.shape), lora)
    inner = gelu_tanh(linear(block.linear_fc1, block.norm2(x), lora))
    return x + linear(block.linear_fc2, inner, lora)


def _merged(
    merger: Qwen3Merger, x: Float[Array, "rows hidden"], lora: LoraDelta | None
) -> Float[Array, "cells out"]:
    size = merger.merged_size
    x = merger.norm(x.reshape(-1, size)) if merger.norm_merged else merger.norm(x).reshape(-1, size)
    return linear(merger.linear_fc2, gelu(linear(merger.linear_fc1, x, lora)), lora)
