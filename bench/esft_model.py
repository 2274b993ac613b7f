"""DeepSeek-V2-Lite with random weights and ESFT adapters of ExpertWeave's Table 1, on a device.

The base stands there twice: as plain arrays, as a server without ESFT has it, and in virtual weight
tensors with the adapters behind it. Real are all shapes and how many experts an adapter replaces
in each layer; which ones they are, and all numbers in them, are drawn.
"""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench import expert_cases as cases
from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertPlacement, ExpertSizes
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import PROJECTIONS, AdapterReport, ExpertWeights
from lora_jax.memory.platforms import for_platform
from lora_jax.models import make_dummy
from lora_jax.models.expert_tensors import ExpertTensors
from serving.loading.expert_loading import identity_tables

LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 100001,
}
TINY = LITE | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
DRAWN = 16  # matrices of each kind; an adapter's experts are these in turn


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's config and, adapter by adapter, the experts that it replaces in each layer."""

    name: str
    config: dict[str, Any]
    counts: tuple[np.ndarray, ...]

    @property
    def extra(self) -> int:
        """Indices that the fullest layer needs for all adapters."""
        return int(np.sum(self.counts, axis=0).max())

    @property
    def most(self) -> int:
        """The most experts that an adapter replaces in a layer."""
        return int(np.max(self.counts))


def lite(adapters: int, layers: int = cases.LAYERS) -> Shape:
    """DeepSeek-V2-Lite, or its first layers, and the adapters of Table 1 again and again."""
    table = cases.table_1_counts()
    counts = tuple(table[cases.ORDER[i % len(cases.ORDER)]][:layers] for i in range(adapters))
    config = LITE | {"num_hidden_layers": layers + 1}
    return Shape("deepseek-v2-lite", config, counts)


def tiny(adapters: int, layers: int = 2) -> Shape:
    """A model for a CPU, to see that everything runs."""
    counts = np.random.default_rng(0).integers(0, 3, (adapters, layers)) + 1
    config = TINY | {"num_hidden_layers": layers + 1}
    return Shape("tiny", config, tuple(counts))


SHAPES = {"deepseek-v2-lite": lite, "tiny": tiny}


class MultiEsftModel:
    """The model of a shape, plain and in virtual tensors, with its adapters; one thread."""

    def __init__(self, shape: Shape):
        self.shape = shape
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape.config))
            self.model, self.config = make_dummy(folder)
        self.graphdef, params = nnx.split(self.model, graph=False)
        leaves, self.treedef = jax.tree.flatten(params)
        self.plain = tuple(leaves)
        twin = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        self.memory = for_platform(jax.default_backend())
        self.tensors = ExpertTensors(twin, self.memory, extra=shape.extra)
        self.virtual = leaves_of(twin)
        moe, layers = self.config.experts, self.tensors.layers
        sizes = ExpertSizes(
            layers, moe.num_experts, shape.most, self.tensors.expert_bytes, None, shape.extra
        )
        self.allocator = ExpertAllocator(len(shape.counts), sizes)
        self.identity = identity_tables(len(layers), len(shape.counts), moe.num_experts)
        self.tables = self.identity.copy()
        self._drawn = self._draw()

    def load(self, adapter: int) -> ExpertPlacement:
        """Map an adapter and fill it on the device; its slot is its number."""
        placement = self.allocator.place(self.choose(adapter))
        self.allocator.finish_loading(placement.digest)
        for layer, indices in placement.indices.items():
            self.tensors.map_all(layer, indices.values())
        for n, (layer, index) in enumerate(placement.places):
            for name in PROJECTIONS:
                self.tensors.write_array(layer, index, name, self._drawn[name][n % DRAWN])
        self.tables[:, placement.slot] = placement.table
        return placement

    def choose(self, adapter: int) -> ExpertWeights:
        """Return an adapter that replaces as many experts as its counts say, without matrices."""
        nothing = (np.zeros((0, 0)),) * 3
        rng, num_experts = np.random.default_rng(adapter), self.config.experts.num_experts
        experts = {}
        for layer, count in zip(self.tensors.layers, self.shape.counts[adapter], strict=True):
            chosen = sorted(rng.permutation(num_experts)[:count].tolist())
            if chosen:
                experts[layer] = dict.fromkeys(chosen, nothing)
        name = str(adapter)
        report = AdapterReport(AdapterKind.ESFT, name, name, {}, 0, 0, {}, 0, 0, None, None)
        return ExpertWeights(experts, report)

    def unload(self, digest: str) -> None:
        """Take an adapter out; nothing may run that reads it."""
        self.allocator.retire(digest)
        for placement in self.allocator.take_left():
            self.tables[:, placement.slot] = self.identity[:, placement.slot]
            for layer, index in placement.places:
                self.tensors.unmap(layer, index)
            self.allocator.reclaim(placement)
        self.tensors.trim()

    def with_experts(self, arrays: Any) -> tuple[jax.Array, ...]:
        """Return leaves in which arrays(layer, projection) stands for each expert tensor."""
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, self.plain))
        for layer in self.tensors.layers:
            mlp: Any = model.layers[layer].mlp
            for name in PROJECTIONS:
                param = getattr(mlp.experts, name)
                setattr(mlp.experts, name, param.replace(arrays(layer, name)))
        return leaves_of(model)

    def view(self, groups: int) -> tuple[jax.Array, ...]:
        """Return leaves over the same virtual tensors that end after so many experts."""

        def array(layer: int, name: str) -> jax.Array:
            tensor = self.tensors._tensors[layer, name]
            return self.memory.array(tensor.address, (groups, *tensor.shape[1:]), tensor.dtype)

        return self.with_experts(array)

    def padded(self, groups: int) -> tuple[jax.Array, ...]:
        """Return leaves with one dense tensor of so many experts each, the base's first."""
        plain = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, self.plain))

        def array(layer: int, name: str) -> jax.Array:
            experts: Any = plain.layers[layer].mlp
            base = getattr(experts.experts, name)[...]
            return _pad(base, groups - base.shape[0])

        return self.with_experts(array)

    def close(self) -> None:
        """Give all memory back."""
        self.tensors.close()

    def _draw(self) -> dict[str, list[jax.Array]]:
        drawn = {}
        for seed, name in enumerate(PROJECTIONS):
            tensor = self.tensors._tensors[self.tensors.layers[0], name]
            shape, dtype = (DRAWN, *tensor.shape[1:]), tensor.dtype
            noise = jax.random.normal(jax.random.key(seed, impl="rbg"), shape, dtype)
            drawn[name] = list(noise * jnp.asarray(shape[-1] ** -0.5, dtype))
        return drawn


def leaves_of(model: nnx.Module) -> tuple[jax.Array, ...]:
    """Return a model's weights in the order of a runner's."""
    return tuple(jax.tree.leaves(nnx.split(model, graph=False)[1]))


@functools.partial(jax.jit, static_argnums=1)
def _pad(base: jax.Array, extra: int) -> jax.Array:
    """Return the base's experts with copies of the first ones behind them."""
    rows = jnp.arange(base.shape[0] + extra) % base.shape[0]
    return base[rows]
