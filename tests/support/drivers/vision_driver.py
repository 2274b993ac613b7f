"""Tools of the vision tests: tiny models of every family, their towers, prompts with images."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support.drivers.model_driver import Driver

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ForwardBatch, ImageRows
from lora_jax.config import ModelConfig
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.vision import TowerInputs
from lora_jax.vision import layout
from lora_jax.vision.processor import Patches, ProcessorSettings
from lora_jax.vision.rope_positions import rope_positions

IMAGE, START, END = 61, 62, 63  # token ids of the tiny models
QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return a random RGB image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image in a prompt: its first token, its grid of patches, its rows."""

    start: int
    grid: tuple[int, int]
    rows: np.ndarray  # f32 [tokens, parts, hidden]


class Tower:
    """The tower of a model as one program."""

    def __init__(self, model: AbstractCausalLM, config: ModelConfig, settings: ProcessorSettings):
        graphdef, state = nnx.split(model.tower, graph=False)
        self._leaves, treedef = jax.tree.flatten(state)
        self.config, names = config.tower, model.module_names
        self.settings = settings

        def run(leaves, inputs, adapters, slot, max_rank):
            tower = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            slots = jnp.full((inputs.patches.shape[0],), slot, jnp.int32)
            count = inputs.num_patches
            routing = AdapterRouting(count, slots, adapters, names, max_rank)
            return tower(inputs, routing.with_items())

        self._run = jax.jit(run, static_argnames="max_rank")

    def with_weights_of(self, model: AbstractCausalLM) -> "Tower":
        """Return the tower of another model of the same shape that shares what is compiled."""
        other = copy.copy(self)
        other._leaves = jax.tree.leaves(nnx.split(model.tower, graph=False)[1])
        return other

    def __call__(
        self,
        image: Patches,
        bucket: int | None = None,
        adapters: AdapterSlots | None = None,
        slot: int = -1,
        max_rank: int = 0,
    ) -> np.ndarray:
        """Return the rows of one image, f32 [tokens, parts, hidden]."""
        wanted = layout.tower_patches(self.config, image.grid)
        size = bucket or min(b for b in layout.buckets(self.config, wanted) if b >= wanted)
        arrays = layout.arrange(self.config, image, size)
        fields = vars(arrays) | {"patches": np.concatenate(arrays.patches)}
        fields = {name: jnp.asarray(array) for name, array in fields.items()}
        inputs = TowerInputs(**fields, values=jnp.asarray(self.settings.values))
        at = jnp.int32(slot)
        rows = self._run(self._leaves, inputs, adapters, at, max_rank=max_rank)
        return np.asarray(rows)[: layout.num_tokens(self.config, image.grid)]


class VisionDriver(Driver):
    """A Driver whose sequences may hold images; `images` are those of each sequence."""

    def __init__(self, model: AbstractCausalLM, config: ModelConfig, page_size: int = 4):
        super().__init__(model, config, page_size)
        self.images: list[list[PlacedImage]] = []

    def batch(self, chunks, slots, bucket, esft_slots=None, tables=None) -> ForwardBatch:
        plain = super().batch(chunks, slots, bucket, esft_slots, tables)
        tower, length = self.config.tower, self.config.max_positions
        parts = 1 + len(tower.deepstack)
        rows = [np.full((1, parts, tower.out_size), np.nan, np.float32)]  # no one's
        places, positions, first = [], [], 1
        for images in self.images or [[]] * len(slots):
            at = np.full(length, -1, np.int32)
            for image in images:
                count = len(image.rows)
                at[image.start : image.start + count] = first + np.arange(count)
                first += count
                rows.append(image.rows)
            places.append(at)
            grids = [(image.start, image.grid) for image in images]
            has_sections = self.config.rope.sections is not None
            positions.append(rope_positions(tower, has_sections, grids, length))
        seq, index = np.asarray(plain.token_to_seq), np.asarray(plain.positions)
        real = np.arange(bucket) < int(plain.num_tokens)
        token_to_row = np.where(real, np.stack(places)[seq, index], -1).astype(np.int32)
        three = np.stack(positions)[seq, :, index].T.astype(np.int32)
        images = ImageRows(
            jnp.asarray(np.concatenate(rows), self.dtype),
            jnp.asarray(token_to_row),
            jnp.asarray(three),
        )
        return dataclasses.replace(plain, images=images)


def prompt_of(config: ModelConfig, parts: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return token ids, and where images start, of parts that are ids or grids of patches."""
    tokens: list[int] = []
    starts = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        starts.append(len(tokens))
        tokens += [config.tower.image_token_id] * layout.num_tokens(config.tower, part)
    return tokens, starts
