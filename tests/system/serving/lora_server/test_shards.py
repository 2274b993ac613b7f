"""The parts of an adapter: together they are the adapter, and no unit lies on two ranks."""

import dataclasses

import numpy as np
import pytest
from support.cases import adapter_cases

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ModuleReport, SiteWeights
from lora_jax.config import from_hf
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server import shards
from serving.lora_server.shards import EXPERT_MODULES, ShardLayout

EXPERTS, LAYERS, MOE_LAYERS = 8, 5, (1, 2, 4)
PLANS = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 3), (8, 1)]
RNG = np.random.default_rng(0)


def make_layout(ep: int, pp: int) -> ShardLayout:
    return ShardLayout(
        ServerLayout(AdapterShape(4, len(MOE_LAYERS), EXPERTS, 1), ep, pp), MOE_LAYERS
    )


def catalogue() -> LoraCatalogue:
    return adapter_cases.moe(experts=EXPERTS, layers=LAYERS)


def adapter(shared: bool = False) -> AdapterWeights:
    """q_proj everywhere, all experts of the MoE layers; gate and up may share one A."""
    sites = {("q_proj", layer): site(1, 2, 16, 16) for layer in range(LAYERS)}
    for layer in MOE_LAYERS:
        gate = site(EXPERTS, 3, 16, 12)
        up = site(EXPERTS, 3, 16, 12)
        if shared:
            one = np.ones((1, 3, 16), np.float32)
            gate, up = (SiteWeights(one, s.b, s.scaling) for s in (gate, up))
        sites |= dict(zip([(m, layer) for m in EXPERT_MODULES], [gate, up], strict=False))
        sites["experts.down_proj", layer] = site(EXPERTS, 3, 12, 16)
    report = AdapterReport(AdapterKind.LORA, "f", "d" * 64, {}, 0, 0, {}, 3, 0, None, None)
    return AdapterWeights(sites, report)


def site(experts: int, rank: int, d_in: int, d_out: int) -> SiteWeights:
    shapes = (experts, rank, d_in), (experts, rank, d_out)
    return SiteWeights(*(RNG.standard_normal(s).astype(np.float32) for s in shapes), 2.0)


def ranks_of(layout: shards.ShardLayout, layer: int) -> range:
    """Return the ranks that share a layer of the model, in order of their experts."""
    return layout.placement.group_of(layout.moe_layers.index(layer))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("ep", "pp"), PLANS)
def test_parts_are_the_adapter(ep, pp, shared):
    weights, layout = adapter(shared), make_layout(ep, pp)
    whole = {key: [] for key in weights.sites if key[0] in EXPERT_MODULES}
    for rank in range(layout.num_ranks):
        part = shards.shard_part(weights, layout.shard(rank))
        assert part.digest == weights.digest
        for key, found in part.sites.items():
            whole[key].append(found)
            assert rank in ranks_of(layout, key[1])
    for key, found in whole.items():
        assert len(found) == ep
        if not shared or key[0] == "experts.down_proj":
            np.testing.assert_array_equal(
                np.concatenate([f.a for f in found]), weights.sites[key].a
            )
        np.testing.assert_array_equal(np.concatenate([f.b for f in found]), weights.sites[key].b)
    local = shards.local_part(weights, layout)
    assert local.sites.keys() | whole.keys() == weights.sites.keys()
    assert not local.sites.keys() & whole.keys()
    assert local.digest == weights.digest


def test_a_matrix_that_is_shared_stays_shared():
    layout = make_layout(2, 1)
    part = shards.shard_part(adapter(shared=True), layout.shard(1))
    for layer in MOE_LAYERS:
        gate, up = (part.sites[name, layer] for name in EXPERT_MODULES[:2])
        assert gate.a is up.a
        assert gate.a.shape[0] == 1
        assert gate.b.shape[0] == EXPERTS // 2


def test_parts_hold_no_view_of_the_adapter():
    weights = adapter()
    part = shards.shard_part(weights, make_layout(2, 1).shard(0))
    for key, found in part.sites.items():
        assert not np.shares_memory(found.a, weights.sites[key].a)


@pytest.mark.parametrize(("ep", "pp"), PLANS)
def test_every_unit_lies_on_the_rank_that_is_asked(ep, pp):
    layout = make_layout(ep, pp)
    for index, layer in enumerate(MOE_LAYERS):
        for expert in range(EXPERTS):
            (rank,) = [
                rank
                for rank in ranks_of(layout, layer)
                if expert in range(EXPERTS)[layout.shard(rank).expert_slice]
            ]
            assert rank == layout.placement.device_of(0, index, expert)
            assert layer in layout.shard(rank).layers


def test_catalogues_split_the_modules():
    whole, layout = catalogue(), make_layout(2, 3)
    shard = layout.shard(3)
    local, mine = shards.local_catalogue(whole, layout), shards.shard_catalogue(whole, shard)
    assert set(local.modules) | set(mine.modules) == set(whole.modules)
    assert set(mine.modules) == set(EXPERT_MODULES)
    assert not set(local.modules) & set(mine.modules)
    for module in mine.modules.values():
        assert module.layers == shard.layers == (MOE_LAYERS[1],)
        assert module.num_experts == EXPERTS // 2


def test_attention_may_be_on_the_rank_of_a_layers_first_expert():
    whole, layout = catalogue(), dataclasses.replace(make_layout(2, 3), attention=True)
    local = shards.local_catalogue(whole, layout)
    dense = tuple(layer for layer in range(LAYERS) if layer not in MOE_LAYERS)
    for name in shards.ATTENTION_MODULES:
        assert local.modules[name].layers == dense
    assert not set(local.modules) & set(EXPERT_MODULES)
    both = [shards.shard_catalogue(whole, layout.shard(rank)).modules for rank in (2, 3)]
    assert set(both[0]) == {*EXPERT_MODULES, *shards.ATTENTION_MODULES}
    assert set(both[1]) == set(EXPERT_MODULES)
    assert (both[0]["q_proj"].layers, both[0]["q_proj"].num_experts) == ((MOE_LAYERS[1],), 0)
    weights = adapter()
    parts = [shards.shard_part(weights, layout.shard(rank)) for rank in (2, 3)]
    q = weights.sites["q_proj", MOE_LAYERS[1]]
    np.testing.assert_array_equal(parts[0].sites["q_proj", MOE_LAYERS[1]].a, q.a)
    assert not any(module == "q_proj" for module, _ in parts[1].sites)
    kept = shards.local_part(weights, layout).sites
    assert set(kept) == {("q_proj", layer) for layer in dense}


def test_attention_of_another_kind_is_refused():
    layout = dataclasses.replace(make_layout(1, 1), attention=True)
    modules = {name: m for name, m in catalogue().modules.items() if name != "k_proj"}
    latent = dataclasses.replace(catalogue(), modules=modules)
    with pytest.raises(ValueError, match=r"not made of q_proj, k_proj.* --lora-attention local"):
        shards.shard_catalogue(latent, layout.shard(0))


def test_which_adapters_need_the_server():
    report = adapter().report
    for names, layer, experts, attention in (
        (("q_proj",), 1, False, True),
        (("q_proj",), 0, False, False),
        (("q_proj", "experts.up_proj"), 1, True, True),
        (("router",), 1, False, False),
    ):
        modules = dict.fromkeys(names, ModuleReport((layer,), (3,), (2.0,)))
        some = dataclasses.replace(report, modules=modules)
        assert make_layout(1, 1).has_any(some) is experts
        assert dataclasses.replace(make_layout(1, 1), attention=True).has_any(some) is attention


def test_the_local_part_counts_its_own_bytes():
    part = shards.local_part(adapter(), make_layout(1, 1))
    assert part.report.weight_bytes == LAYERS * 2 * 2 * 16 * 4


def test_a_part_in_8_bits_shares_the_matrices_of_the_whole():
    weights = adapter(shared=True)
    modules = {"experts.up_proj": ModuleReport(MOE_LAYERS, (3,), (2.0,))}
    report = dataclasses.replace(weights.report, modules=modules)
    kept = shards.split(dataclasses.replace(weights, report=report), make_layout(1, 1))
    part = kept.in_8_bits()
    assert isinstance(part, shards.SplitWeights)
    want = weights.in_8_bits()
    assert set(part.sites) == {("q_proj", layer) for layer in range(LAYERS)}
    assert set(part.whole.sites) == set(weights.sites)
    for key, site in part.whole.sites.items():
        assert site.a.dtype == np.int8
        np.testing.assert_array_equal(site.b, want.sites[key].b)
    for key, site in part.sites.items():
        assert site.a is part.whole.sites[key].a
    assert part.whole.digest == kept.whole.digest
    assert part.report.weight_bytes == want.report.weight_bytes


def test_experts_that_no_adapter_changes_are_refused():
    with pytest.raises(ValueError, match="cannot change the experts of dbrx"):
        shards.shard_catalogue(adapter_cases.dbrx(), make_layout(1, 1).shard(0))


CONFIG = {
    "model_type": "mixtral",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("ep3-pp1", 3, r"4 experts .* ep=3 .* choose ep from 1, 2, 4"),
        ("ep2-pp1", 4, r"needs 2 devices and there are 4; choose from ep1-pp4, ep2-pp2, ep4-pp1"),
        ("ep1-pp4", 4, r"2 layers cannot fill pp=4"),
        ("dp2", 2, r"use epX-ppY with X \* Y = 2"),
        ("2x1", 2, r"A placement is written ep4-pp2"),
    ],
)
def test_impossible_placements_say_what_to_change(text, ranks, message):
    with pytest.raises(ValueError, match=message):
        shards.shard_layout(from_hf(CONFIG), text, ranks, 4, 8, 4)


def test_a_dense_model_is_refused():
    dense = {k: v for k, v in CONFIG.items() if "expert" not in k} | {"model_type": "llama"}
    with pytest.raises(ValueError, match="mixture-of-experts"):
        shards.shard_layout(from_hf(dense), "ep1-pp1", 1, 4, 8, 4)


def test_server_plan_of_a_config():
    layout = shards.shard_layout(from_hf(CONFIG), "ep2-pp2", 4, 4, 8, 4)
    assert layout.num_ranks == 4
    assert [layout.shard(r).layers for r in range(4)] == [(0,), (0,), (1,), (1,)]
    assert ranks_of(layout, 1) == range(2, 4)
