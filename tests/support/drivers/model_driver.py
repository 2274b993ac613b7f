"""Tools of the model tests: checkpoints in two dialects, steps through pages, adapters by hand."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ForwardBatch
from lora_jax.config import ModelConfig, from_hf
from lora_jax.kv_cache import init_cache
from lora_jax.models import build
from lora_jax.nn.decoder import AbstractCausalLM

TOLERANCE = 1e-4  # of float32 logits against an oracle
NUM_GREEDY = 32
# Sizes that are all different, so that a transposed or mistaken matrix cannot fit.
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # logits of a few units: text depends on every part
}
WIDTH = 24

Site = tuple[np.ndarray, np.ndarray, float]  # A [experts or 1, rank, d_in], B [.., d_out], scaling
Sites = dict[tuple[str, int], Site]


# --- checkpoints -----------------------------------------------------------------------------


def save_oracle(oracle: Any, folder: Path) -> Path:
    """Write a transformers model as transformers 5 does."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    oracle.save_pretrained(folder)
    return folder


def hub_copy(
    source: Path,
    target: Path,
    rename: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]],
    hub_config: Callable[[dict[str, Any]], dict[str, Any]],
) -> Path:
    """Write the checkpoint of `source` with other tensor names and config keys, in two shards."""
    target.mkdir()
    tensors = rename(load_file(source / "model.safetensors"))
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    weight_map = {}
    for file, members in shards.items():
        save_file({name: np.ascontiguousarray(tensors[name]) for name in members}, target / file)
        weight_map |= dict.fromkeys(members, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = hub_config(json.loads((source / "config.json").read_text()))
    (target / "config.json").write_text(json.dumps(config))
    return target


def old_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys that files had before transformers 5."""
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    return config


def fuse_experts(tensors: dict[str, np.ndarray], parts: tuple[str, str, str], parent: str):
    """Return the tensors with every `<parent with {layer}>.<expert>.<part>.weight` fused.

    `parts` names gate, up and down; the result is gate_up_proj and down_proj below `parent`.
    """
    pattern = re.compile(
        re.escape(parent).replace(r"\{layer\}", r"(\d+)") + r"\.(\d+)\.(.+)\.weight"
    )
    found: dict[str, dict[tuple[int, str], np.ndarray]] = {}
    kept = {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            layer, expert, part = match.groups()
            found.setdefault(parent.format(layer=layer), {})[int(expert), part] = tensor
        else:
            kept[name] = tensor
    for at, experts in found.items():
        count = 1 + max(expert for expert, _ in experts)
        gate, up, down = (np.stack([experts[e, p] for e in range(count)]) for p in parts)
        kept[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        kept[f"{at}.down_proj"] = down
    return kept


def random_model(raw: dict[str, Any]) -> tuple[AbstractCausalLM, ModelConfig]:
    """Return a float32 model whose every parameter is random, so that no bias or norm is trivial.

    Numpy draws them, and nothing is compiled.
    """
    config = from_hf(raw)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build(config)), graph=False)
    rng, made = np.random.default_rng(1), []
    for path, param in nnx.to_flat_state(state):
        is_norm = path[-1] == "weight" and len(param.shape) == 1
        value = 0.3 * rng.standard_normal(param.shape) + is_norm
        made.append((path, param.replace(jnp.asarray(value, param.dtype))))
    return nnx.merge(graphdef, nnx.from_flat_state(made)), config


# --- running ---------------------------------------------------------------------------------


class Driver:
    """Prompts through pages, several at a time and some tokens at a time."""

    def __init__(self, model: AbstractCausalLM, config: ModelConfig, page_size: int = 4):
        graphdef, state = nnx.split(model, graph=False)
        self._leaves, treedef = jax.tree.flatten(state)
        self.config, self.page_size = config, page_size
        self.pages_per_seq = -(-config.max_positions // page_size)
        self.kv_shape = model.kv_shape(config)
        self.dtype = jnp.dtype(model.embed.weight.dtype)

        def step(leaves, batch, cache, adapters, max_rank):
            merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, cache = merged(batch, cache, adapters, max_rank)
            slots = batch.token_to_slot
            return merged.logits(hidden, batch.num_tokens, slots, adapters, max_rank), cache

        self._step = jax.jit(step, static_argnames="max_rank", donate_argnames="cache")

    def with_weights_of(self, model: AbstractCausalLM) -> "Driver":
        """Return a driver of another model of the same shape that shares what is compiled."""
        other = copy.copy(self)
        other._leaves = jax.tree.leaves(nnx.split(model, graph=False)[1])
        return other

    def new_cache(self, num_seqs: int):
        pages = 1 + num_seqs * self.pages_per_seq
        return init_cache(self.kv_shape, pages, self.page_size, self.dtype)

    def batch(
        self,
        chunks: Sequence[tuple[int, int, Sequence[int]]],
        slots: Sequence[int],
        bucket: int,
        esft_slots: Sequence[int] | None = None,
        tables: np.ndarray | None = None,
    ) -> ForwardBatch:
        """Return the batch of (sequence, first position, tokens), padded to `bucket` tokens.

        Pages are dealt out in reverse, so that a page's number says nothing about its place.
        `esft_slots` of the sequences are rows of `tables` [moe_layers, slots, experts].
        """
        num_seqs = len(slots)
        block_tables = 1 + np.arange(num_seqs * self.pages_per_seq)[::-1].reshape(num_seqs, -1)
        columns: list[list[int]] = [[] for _ in range(5)]
        for seq, start, tokens in chunks:
            for position, token in enumerate(tokens, start):
                page = int(block_tables[seq, position // self.page_size])
                place = page * self.page_size + position % self.page_size
                for column, value in zip(
                    columns, (token, position, seq, slots[seq], place), strict=True
                ):
                    column.append(value)
        real = len(columns[0])
        outside = (1 + num_seqs * self.pages_per_seq) * self.page_size
        padded = [
            np.array(column + [padding] * (bucket - real), np.int32)
            for column, padding in zip(columns, (0, 0, 0, -1, outside), strict=True)
        ]
        arrays = (jnp.asarray(a) for a in (*padded, block_tables.astype(np.int32)))
        plain = ForwardBatch(*arrays, jnp.asarray(real, jnp.int32))
        if esft_slots is None or tables is None:
            return plain
        own = np.array([esft_slots[s] for s in padded[2][:real]] + [-1] * (bucket - real), np.int32)
        return dataclasses.replace(
            plain, token_to_esft_slot=jnp.asarray(own), reroute_tables=jnp.asarray(tables)
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        chunk: int | None = None,
        slots: Sequence[int] | None = None,
        adapters: AdapterSlots | None = None,
        max_rank: int = 0,
        esft_slots: Sequence[int] | None = None,
        tables: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Return f32 logits [len, vocab] of every prompt; all run together, `chunk` tokens each."""
        slots = slots or [-1] * len(prompts)
        cache, done = self.new_cache(len(prompts)), 0
        results: list[list[np.ndarray]] = [[] for _ in prompts]
        size = chunk or max(len(prompt) for prompt in prompts)
        while any(done < len(prompt) for prompt in prompts):
            chunks = [(n, done, p[done : done + size]) for n, p in enumerate(prompts) if p[done:]]
            total = sum(len(tokens) for *_, tokens in chunks)
            batch = self.batch(chunks, slots, bucket_of(total), esft_slots, tables)
            logits, cache = self._step(self._leaves, batch, cache, adapters, max_rank=max_rank)
            rows, first = np.asarray(logits), 0
            for seq, _, tokens in chunks:
                results[seq].append(rows[first : first + len(tokens)])
                first += len(tokens)
            done += size
        return [np.concatenate(parts) for parts in results]

    def greedy(self, prompt: Sequence[int], count: int = NUM_GREEDY) -> list[int]:
        """Return the most likely tokens after a prompt, one step each through the pages."""
        cache, tokens, start = self.new_cache(1), list(prompt), 0
        while len(tokens) < len(prompt) + count:
            chunk = tokens[start:]
            batch = self.batch([(0, start, chunk)], [-1], bucket_of(len(chunk)))
            logits, cache = self._step(self._leaves, batch, cache, None, max_rank=0)
            start = len(tokens)
            tokens.append(int(np.argmax(np.asarray(logits)[len(chunk) - 1])))
        return tokens[len(prompt) :]


def bucket_of(tokens: int) -> int:
    """Return the next power of two."""
    return 1 << (tokens - 1).bit_length()


def oracle_logits(oracle: Any, prompt: Sequence[int]) -> np.ndarray:
    """Return the transformers model's float32 logits [len, vocab]."""
    import torch

    with torch.no_grad():
        return oracle(input_ids=torch.tensor([list(prompt)])).logits[0].float().numpy()


def oracle_greedy(oracle: Any, prompt: Sequence[int], count: int = NUM_GREEDY) -> list[int]:
    """Return the transformers model's most likely tokens, by its own cache."""
    import torch

    tokens: list[int] = []
    new, past = list(prompt), None
    with torch.no_grad():
        while len(tokens) < count:
            ids = torch.tensor([new])
            out = oracle(input_ids=ids, past_key_values=past, use_cache=True)
            past, new = out.past_key_values, [int(out.logits[0, -1].argmax())]
            tokens += new
    return tokens


# --- adapters --------------------------------------------------------------------------------

_TOWER_MAPS = ("linear_fc1", "linear_fc2")
# Where the weight of a module lies; {layer} is filled in.
WEIGHT_OF = {
    **{f"{n}_proj": f"layers.{{layer}}.attn.{n}_proj.weight" for n in "qkvo"},
    **{f"{n}_proj": f"layers.{{layer}}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{
        f"experts.{n}_proj": f"layers.{{layer}}.mlp.experts.{n}_proj"
        for n in ("gate", "up", "down")
    },
    **{
        f"shared_experts.{n}_proj": f"layers.{{layer}}.mlp.shared_experts.{n}_proj.weight"
        for n in ("gate", "up", "down")
    },
    **{
        n: f"layers.{{layer}}.attn.{n}.weight"
        for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    },
    "kv_b_proj.k": "layers.{layer}.attn.absorb_k.weight",
    "kv_b_proj.v": "layers.{layer}.attn.absorb_v.weight",
    "router": "layers.{layer}.mlp.router.weight",
    "lm_head": "lm_head.weight",
    **{f"visual.attn.{n}": f"tower.blocks.{{layer}}.attn.{n}.weight" for n in ("qkv", "proj")},
    **{f"visual.mlp.{n}": f"tower.blocks.{{layer}}.{n}.weight" for n in _TOWER_MAPS},
    **{f"visual.merger.{n}": f"tower.merger.{n}.weight" for n in _TOWER_MAPS},
    **{
        f"visual.mlp.{n}_proj": f"tower.blocks.{{layer}}.{n}_proj.weight"
        for n in ("gate", "up", "down")
    },
    **{f"visual.merger.mlp.{n}": f"tower.merger.mlp_{n}.weight" for n in "02"},
    **{
        f"visual.self_attn.{n}": f"tower.layers.{{layer}}.{n}.weight"
        for n in ("q_proj", "k_proj", "v_proj", "out_proj")
    },
    **{f"visual.mlp.fc{n}": f"tower.layers.{{layer}}.fc{n}.weight" for n in "12"},
    **{f"visual.projector.linear_{n}": f"tower.linear_{n}.weight" for n in "12"},
    **{
        f"visual.deepstack_merger_list.{n}": f"tower.deepstack.{{layer}}.{n}.weight"
        for n in _TOWER_MAPS
    },
}


def random_sites(
    catalogue: LoraCatalogue, seed: int, modules: Sequence[str] | None = None
) -> Sites:
    """Return LoRA on every site of the modules (default: all), of ranks 1 to 5."""
    rng = np.random.default_rng(seed)
    sites: Sites = {}
    for name in modules or catalogue.module_names:
        module = catalogue.modules[name]
        experts = max(1, module.num_experts)
        for layer in module.layers:
            rank = int(rng.integers(1, 6))
            a = rng.standard_normal((experts, rank, module.d_in)).astype(np.float32)
            b = rng.standard_normal((experts, rank, module.d_out)).astype(np.float32)
            shared = experts > 1 and int(rng.integers(3))
            if shared == 1:
                a = a[:1]
            elif shared == 2:
                b = b[:1]
            scaling = 0.3 / np.sqrt(rank * module.d_in)
            sites[name, layer] = (a, b, float(scaling))
    return sites


def fill_slots(
    catalogue: LoraCatalogue, adapters: Sequence[Sites], dtype: Any = jnp.float32
) -> AdapterSlots:
    """Return slots that hold the adapters in order, with some rows of noise before each matrix."""
    noise = np.random.default_rng(99)
    pools: dict[int, list[np.ndarray]] = {width: [] for width in catalogue.widths}
    shape = (len(catalogue.modules), catalogue.num_layers, len(adapters))
    entries, scaling = np.zeros((*shape, 5), np.int32), np.zeros(shape, np.float32)

    def append(matrix: np.ndarray) -> tuple[int, int]:
        experts, rank, width = matrix.shape
        pool = pools[width]
        pool.append(noise.standard_normal((2, width)).astype(np.float32))
        offset = sum(len(part) for part in pool)
        pool.append(matrix.reshape(-1, width))
        return offset, (rank if experts > 1 else 0)

    for slot, sites in enumerate(adapters):
        for (name, layer), (a, b, factor) in sites.items():
            at = catalogue.module_names.index(name), layer, slot
            (a_offset, a_stride), (b_offset, b_stride) = append(a), append(b)
            entries[at] = a_offset, b_offset, a.shape[1], a_stride, b_stride
            scaling[at] = factor
    for width, pool in pools.items():
        pool.append(np.zeros((1, width), np.float32))
    rows = {str(w): jnp.asarray(np.concatenate(pool), dtype) for w, pool in pools.items()}
    return AdapterSlots(rows, jnp.asarray(entries), jnp.asarray(scaling))


def highest_rank(sites: Sites) -> int:
    return max((a.shape[1] for a, _, _ in sites.values()), default=0)


def merged(model: AbstractCausalLM, sites: Sites) -> AbstractCausalLM:
    """Return the model with scaling * B^T A added to its weights, in float32."""
    graphdef, state = nnx.split(model, graph=False)
    flat = dict(nnx.to_flat_state(state))
    by_name = {".".join(map(str, path)): path for path in flat}
    for (name, layer), (a, b, factor) in sites.items():
        path = by_name[WEIGHT_OF[name].format(layer=layer)]
        delta = factor * np.matmul(np.swapaxes(b, 1, 2), a)
        param = flat[path]
        value, place = np.asarray(param[...]), param[...].sharding  # same place: no compilation
        changed = value + delta.reshape(value.shape).astype("f4")
        flat[path] = param.replace(jax.device_put(changed, place))
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.items())))
