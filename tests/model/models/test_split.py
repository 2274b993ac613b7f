"""A model of any family over several devices gives the bits of one, or says why it cannot."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support.cases import adapter_cases

from lora_jax import models
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob
from lora_jax.adapters.slots import AdapterSlots, init_slots, size_slots
from lora_jax.batch import ForwardBatch
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache, pages_sharding
from lora_jax.models import make_dummy, model_class
from lora_jax.models.split import make_split
from lora_jax.nn import gather
from lora_jax.sharding import AXIS

SIZES = {
    "vocab_size": 260,  # no multiple of anything: padded
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
ONE = SIZES | {"num_hidden_layers": 1}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {"num_local_experts": 4, "sliding_window": 4, "head_dim": 8, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 1,
    "max_seq_len": 64,
    "vocab_size": 260,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
}
FAMILIES = {
    "llama": ONE | {"tie_word_embeddings": True},
    "qwen2": ONE,
    "qwen3": ONE | {"head_dim": 8},
    "mixtral": ONE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SIZES | MOE | {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [1]},
    "gpt_oss": SIZES | GPT_OSS,
    "deepseek_v2": SIZES | MOE | LATENT | DEEPSEEK | {"q_lora_rank": 12, "topk_method": "greedy"},
    "dbrx": DBRX,
}
# Experts whole, or a part of each; half of the cases in each dtype.
CASES = [
    ("mixtral", "tp", "bfloat16"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("llama", "ep", "bfloat16"),
            ("mixtral", "ep", "float32"),  # in bfloat16 in a whole engine: engine/test_devices.py
            ("qwen3", "ep", "float32"),
            ("gpt_oss", "tp", "float32"),
            ("deepseek_v2", "ep", "bfloat16"),
            ("dbrx", "ep", "float32"),
            ("qwen2", "ep", "bfloat16"),
            ("qwen3_moe", "ep", "float32"),
            ("qwen3_moe", "tp", "bfloat16"),
            ("gpt_oss", "ep", "bfloat16"),
            ("deepseek_v2", "tp", "float32"),
            ("dbrx", "tp", "bfloat16"),
        )
    ),
]
RANKS = (3, 5)
LENGTHS, SLOTS = (5, 1, 4, 3), (0, 1, -1, 1)  # sequences of one step, and their adapters
TOKENS, PAGE, PAGES = 16, 4, 16


def config_of(name):
    return from_hf(FAMILIES[name] | {"model_type": name})


def make_batch(vocab):
    """One step of four sequences, with padding tokens behind them."""
    seq = np.repeat(np.arange(4), LENGTHS)
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    tables, live = np.arange(16).reshape(4, 4), len(seq)
    tokens = np.random.default_rng(0).integers(0, vocab, live)

    def padded(values, filler):
        return jnp.asarray(np.concatenate([values, filler]).astype(np.int32))

    rest = np.arange(TOKENS - live)
    page_slots = tables[seq, positions // PAGE] * PAGE + positions % PAGE
    return ForwardBatch(
        *(padded(values, 0 * rest) for values in (tokens, positions, seq)),
        padded(np.array(SLOTS)[seq], 0 * rest - 1),
        padded(page_slots, PAGES * PAGE + rest),
        jnp.asarray(tables.astype(np.int32)),
        jnp.int32(live),
    )


def make_adapter(catalogue, rank):
    """An adapter on every module; kv_b_proj has one A for all heads, as files have it."""
    weights = adapter_cases.weights(catalogue, rank, seed=rank)
    for (name, layer), site in weights.sites.items():
        site.a[:], site.b[:] = site.a * 0.1, site.b * 0.1
        if name == "kv_b_proj.v":
            keys = weights.sites["kv_b_proj.k", layer]
            shared = np.ascontiguousarray(site.a[:1])
            weights.sites[name, layer] = dataclasses.replace(site, a=shared)
            weights.sites["kv_b_proj.k", layer] = dataclasses.replace(keys, b=shared)
    return weights


def with_adapters(catalogue, split, dtype):
    """Slots with two adapters of other ranks on every module."""
    local, cut = catalogue, lambda weights: weights
    if split is not None:
        whole = split.experts == "ep", split.vocab_multiple, split.attention_output == "whole"
        widths = LocalWidths(split.size, *whole)
        local, cut = widths.catalogue(catalogue), lambda w: widths.adapter(w, catalogue)
    spec = size_slots(local, 2, max(RANKS), dtype.itemsize)
    allocator = SlotAllocator(catalogue, 2, spec.rows, dtype.itemsize)
    slots = init_slots(local, spec, dtype, split)
    for rank in RANKS:
        weights = make_adapter(catalogue, rank)
        plan = LoraLoadJob(allocator.place(cut(weights)), slots)
        while not plan.done:
            slots = plan.advance(slots, 4)
    return slots


def step_of(folder, split, dtype):
    """A step over the devices that gives the KV pages and logits, and its arguments."""
    model, config = make_dummy(folder, dtype=dtype, split=split)
    slots = with_adapters(model.catalogue(config), split, dtype)
    shape = model.kv_shape(config)
    cache = init_cache(shape, PAGES, PAGE, dtype, split)
    graphdef, params = nnx.split(model, graph=False)
    leaves, treedef = jax.tree.flatten(params)
    caches = jax.tree.structure(cache)

    def step(leaves, cache, batch, pools, entries, scaling):
        slots = AdapterSlots(pools, entries, scaling)
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        hidden, cache = merged(
            batch, jax.tree.unflatten(caches, cache), slots, max(RANKS), None, split
        )
        rows = batch.num_tokens, batch.token_to_slot
        logits = merged.logits(hidden, *rows, slots, max(RANKS), split)
        return jax.tree.leaves(cache), logits

    pages = jax.tree.leaves(cache)
    if split is not None:
        kv = pages_sharding(shape, split).spec
        weights = [leaf.sharding.spec for leaf in leaves]
        step = jax.shard_map(
            step,
            mesh=split.mesh,
            in_specs=(weights, [kv] * len(pages), P(), P(AXIS), P(), P()),
            out_specs=([kv] * len(pages), P()),
            check_vma=False,
        )
    batch = make_batch(config.vocab_size)
    return step, (leaves, pages, batch, slots.pools, slots.entries, slots.scaling)


def forward(folder, split, dtype):
    """Logits of the real tokens of a step, and the KV pages after it."""
    step, arguments = step_of(folder, split, dtype)
    cache, logits = jax.jit(step)(*arguments)
    return np.asarray(logits)[: sum(LENGTHS)], [np.asarray(page) for page in cache]


def same_bits(some, others):
    return (np.asarray(some).view(np.uint8) == np.asarray(others).view(np.uint8)).all()


@pytest.mark.parametrize(("name", "kind", "dtype"), CASES)
def test_base_and_adapters_have_the_bits_of_one_device(tmp_path, name, kind, dtype):
    """Logits and KV pages of one batch of base and LoRA rows."""
    dtype = jnp.dtype(dtype)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name] | {"model_type": name}))
    config = config_of(name)
    split = make_split(config, 2, expert_parallel=None if kind == "ep" else False)
    assert split.experts == kind
    logits, pages = forward(tmp_path, None, dtype)
    other, others = forward(tmp_path, split, dtype)
    assert logits.shape == other.shape == (sum(LENGTHS), config.vocab_size)
    assert len(np.unique(logits)) > 1000
    assert same_bits(logits, other)
    assert all(same_bits(*pair) for pair in zip(pages, others, strict=True))


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "devices", "shared_rows"),
    [
        ("mixtral", "tp", "bfloat16", 2, TOKENS),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("mixtral", "tp", "float32", 2, TOKENS + 1),
                ("mixtral", "ep", "bfloat16", 2, TOKENS),
                ("qwen3_moe", "tp", "float32", 2, TOKENS),
                ("gpt_oss", "ep", "bfloat16", 2, TOKENS),
                ("gpt_oss", "tp", "float32", 2, TOKENS + 1),
                ("deepseek_v2", "ep", "bfloat16", 2, TOKENS),
                ("deepseek_v2", "tp", "float32", 4, TOKENS),
            )
        ),
    ],
)
def test_a_whole_attention_output_has_the_bits_of_one_device(
    tmp_path, monkeypatch, name, kind, dtype, devices, shared_rows
):
    """Devices share the rows of a long prompt; of few rows each computes all outputs."""
    monkeypatch.setattr(gather, "SHARED_ROWS", shared_rows)
    raw, dtype = FAMILIES[name] | {"model_type": name}, jnp.dtype(dtype)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    split = make_split(from_hf(raw), devices, expert_parallel=None if kind == "ep" else False)
    in_parts, whole = (
        dataclasses.replace(split, attention_output=each) for each in ("parts", "whole")
    )
    logits, pages = forward(tmp_path, None, dtype)
    other, others = forward(tmp_path, whole, dtype)
    assert same_bits(logits, other)
    assert all(same_bits(*pair) for pair in zip(pages, others, strict=True))
    programs = []
    for each in (in_parts, whole):
        step, arguments = step_of(tmp_path, each, dtype)
        programs.append(str(jax.make_jaxpr(step)(*arguments)))
    fewer = raw["num_hidden_layers"] * (1 if shared_rows > TOKENS else 0)
    exchanges = [p.count("all_gather[") + p.count("all_to_all[") for p in programs]
    assert exchanges[0] - exchanges[1] == fewer


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("expert_parallel", [True, False])
def test_four_devices(tmp_path, expert_parallel, dtype):
    raw = FAMILIES["mixtral"] | {"num_key_value_heads": 4, "model_type": "mixtral"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    split = make_split(from_hf(raw), 4, expert_parallel=expert_parallel)
    want, got = (forward(tmp_path, each, jnp.dtype(dtype)) for each in (None, split))
    assert same_bits(want[0], got[0])
    assert all(same_bits(*pair) for pair in zip(want[1], got[1], strict=True))


@pytest.mark.long
def test_shared_experts_take_one_exchange_more(tmp_path):
    """That of their inner columns: their outputs are gathered with those of the other experts."""
    counts = []
    for shared in (0, 2):
        raw = FAMILIES["deepseek_v2"] | {"model_type": "deepseek_v2", "n_shared_experts": shared}
        (tmp_path / "config.json").write_text(json.dumps(raw | {"first_k_dense_replace": 0}))
        split = make_split(from_hf(raw), 2, expert_parallel=False)
        step, arguments = step_of(tmp_path, split, jnp.dtype(jnp.float32))
        counts.append(str(jax.make_jaxpr(step)(*arguments)).count("all_gather["))
    assert counts[1] - counts[0] == raw["num_hidden_layers"]


def test_made_up_weights_are_those_of_one_device(tmp_path):
    raw = FAMILIES["mixtral"] | {"model_type": "mixtral"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    whole = jax.tree.leaves(nnx.state(make_dummy(tmp_path)[0]))
    split = make_split(from_hf(raw), 2)
    for one, many in zip(
        whole, jax.tree.leaves(nnx.state(make_dummy(tmp_path, split=split)[0])), strict=True
    ):
        assert same_bits(np.asarray(one), np.asarray(many)[: len(one)])
        assert not np.asarray(many)[len(one) :].any()


def test_one_device_is_no_split():
    assert make_split(config_of("llama"), 1) is None
    assert make_split(config_of("mixtral"), 1, expert_parallel=False) is None


def test_experts_are_whole_where_their_number_divides():
    three = from_hf(FAMILIES["mixtral"] | {"model_type": "mixtral", "num_local_experts": 3})
    assert make_split(config_of("mixtral"), 2).experts == "ep"
    assert make_split(three, 2).experts == "tp"
    with pytest.raises(ValueError, match="3 experts do not divide among 2 devices"):
        make_split(three, 2, expert_parallel=True)
    with pytest.raises(ValueError, match="enable_expert_parallel is for models with experts"):
        make_split(config_of("llama"), 2, expert_parallel=True)


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="tensor_parallel_size is 8, but there are 4 devices"):
        make_split(config_of("llama"), 8)


def test_devices_of_several_kinds_are_refused(monkeypatch):
    """Their kernels' tables differ, and so may their sums."""
    kinds = [SimpleNamespace(device_kind=kind) for kind in ("H200", "H100", "H100")]
    monkeypatch.setattr(jax, "devices", lambda: kinds)
    with pytest.raises(ValueError, match=r"2 devices needs them of one kind, .* H100, H200: "):
        make_split(config_of("llama"), 2)


def test_a_gpu_s_part_of_a_map_is_as_wide_as_its_kernels_want(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=r"hidden_size 32 \(parts of 64\)"):
        make_split(config_of("llama"), 2)


def test_the_families_are_all_that_there_are():
    there = {file.stem for file in Path(models.__file__).parent.glob("*.py")}
    kinds = {model_class(name).__name__ for name in FAMILIES}
    assert kinds == {"Llama", "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV2", "Dbrx"}
    assert {"llama", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "dbrx"} <= there
