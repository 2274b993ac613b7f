"""Adapters of a split model: every device's part is what the whole adapter has there."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters import gains
from lora_jax.adapters.catalogue import EXPERTS, WHOLE
from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.slots import rows_per_adapter
from lora_jax.adapters.weights import AdapterWeights, SiteWeights
from lora_jax.rank_rows import parts

UNIT = 8  # stands for the multiple of a vocabulary


def with_whole_router(catalogue):
    import dataclasses

    modules = dict(catalogue.modules)
    modules["router"] = dataclasses.replace(modules["router"], split=WHOLE)
    for name in ("kv_b_proj.k", "kv_b_proj.v"):
        if name in modules:
            modules[name] = dataclasses.replace(modules[name], split=EXPERTS)
    return dataclasses.replace(catalogue, modules=modules)


MOE = with_whole_router(cases.moe(experts=4))


def shapes(catalogue):
    return {m.name: (m.d_in, m.d_out, m.num_experts) for m in catalogue.modules.values()}


def test_inputs_are_whole_and_outputs_in_parts():
    got = shapes(LocalWidths(2, whole_experts=False, vocab_multiple=UNIT).catalogue(MOE))
    assert got["q_proj"] == (16, 8, 0)
    assert got["k_proj"] == (16, 4, 0)
    assert got["router"] == (16, 4, 0)
    assert got["experts.gate_proj"] == (16, 6, 4)
    assert got["experts.down_proj"] == (12, 8, 4)


def test_experts_are_whole_but_fewer():
    got = shapes(LocalWidths(2, whole_experts=True, vocab_multiple=UNIT).catalogue(MOE))
    assert got["experts.gate_proj"] == (16, 12, 2)
    assert got["experts.down_proj"] == (12, 16, 2)


def test_the_output_of_attention_may_be_whole_with_its_gains():
    with_gains = gains.with_gains(MOE, ["o_proj"])
    local = LocalWidths(2, True, UNIT, whole_attention_output=True)
    got = shapes(local.catalogue(with_gains))
    assert got["o_proj"] == shapes(MOE)["o_proj"]
    assert got[gains.gain_name("o_proj")] == shapes(with_gains)[gains.gain_name("o_proj")]
    assert got["q_proj"] == (16, 8, 0)
    weights = cases.weights(MOE, rank=3)
    site, whole = local.adapter(weights, MOE).sites["o_proj", 0], weights.sites["o_proj", 0]
    for device in range(2):
        np.testing.assert_array_equal(site.b[:, :, device], whole.b)


def test_a_vocabulary_is_padded():
    dense = cases.llama(vocab=20)
    widths = LocalWidths(2, whole_experts=True, vocab_multiple=UNIT)
    assert shapes(widths.catalogue(dense))["lm_head"] == (16, 12, 0)  # 24 rows for 20
    weights = cases.weights(dense, rank=3)
    b = widths.adapter(weights, dense).sites["lm_head", 0].b
    assert b.shape == (1, 3, 2, 12)
    whole = b.reshape(1, 3, 24)
    np.testing.assert_array_equal(whole[..., :20], weights.sites["lm_head", 0].b)
    assert not whole[..., 20:].any()


@pytest.mark.parametrize("whole_experts", [False, True])
def test_each_device_has_its_part_and_no_matrix_is_copied(whole_experts):
    widths = LocalWidths(2, whole_experts, UNIT)
    weights = cases.weights(MOE, rank=3)
    local, catalogue = widths.adapter(weights, MOE), widths.catalogue(MOE)
    for (name, layer), site in weights.sites.items():
        got, module = local.sites[name, layer], catalogue.modules[name]
        assert got.rank == 3
        assert got.scaling == site.scaling
        own = slice(None)
        for device in range(2):
            if whole_experts and name.startswith("experts."):
                own = slice(2 * device, 2 * device + 2)
            a, b = site.a[own], site.b[own]
            if module.d_out < MOE.modules[name].d_out:
                b = b[..., device * module.d_out : (device + 1) * module.d_out]
            np.testing.assert_array_equal(got.a[:, :, device], a)
            np.testing.assert_array_equal(got.b[:, :, device], b)
        assert np.shares_memory(got.a, site.a)
        assert np.shares_memory(got.b, site.b)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_each_part_of_a_row_in_8_bits_has_the_scale_of_the_whole(whole_experts):
    widths = LocalWidths(2, whole_experts, UNIT)
    plain = cases.weights(MOE, rank=3)
    whole, local = plain.in_8_bits(), widths.adapter(plain.in_8_bits(), MOE)
    want = widths.adapter(decoded(whole), MOE)
    for key, site in decoded(local).sites.items():
        np.testing.assert_array_equal(site.a, want.sites[key].a)
        np.testing.assert_array_equal(site.b, want.sites[key].b)


def decoded(weights):
    """The adapter with the values that its rows in 8 bits stand for."""

    def values(matrix):
        steps, scales = parts(matrix)
        return steps * scales[..., None]

    made = {id(matrix): values(matrix) for matrix in weights.matrices()}
    sites = {
        key: SiteWeights(made[id(site.a)], made[id(site.b)], site.scaling)
        for key, site in weights.sites.items()
    }
    return AdapterWeights(sites, weights.report)


@pytest.mark.parametrize("folder", ["0.21.2-deepseek_v2-everything", "hand-mixtral-shared_outer"])
def test_what_sites_share_stays_shared(folder):
    """Rows on a device are those of the local catalogue, latents of all heads counted once."""
    deepseek = "deepseek" in folder
    whole = with_whole_router(cases.deepseek_v2() if deepseek else cases.moe(experts=3))
    weights = peft_format.read(cases.FIXTURES / folder, whole)
    widths = LocalWidths(2, whole_experts=False, vocab_multiple=UNIT)
    local = widths.adapter(weights, whole)
    assert len(list(local.matrices())) == len(list(weights.matrices()))
    most = rows_per_adapter(widths.catalogue(whole), weights.report.max_rank)
    need = local.rows_by_width()
    assert all(count <= most[width] for width, count in need.items())
    if deepseek:
        k, v = local.sites["kv_b_proj.k", 0], local.sites["kv_b_proj.v", 0]
        assert k.b is v.a
        assert (k.a.shape[0], v.b.shape[0]) == (cases.HEADS // 2,) * 2


def test_an_allocator_places_parts_by_their_own_width():
    widths = LocalWidths(2, whole_experts=True, vocab_multiple=UNIT)
    local = widths.catalogue(MOE)
    rows = rows_per_adapter(local, 3)
    allocator = SlotAllocator(MOE, 1, rows)
    weights = widths.adapter(cases.weights(MOE, rank=3), MOE)
    allocator.check_fits(weights)
    placed = allocator.place(weights)
    for width, writes in placed.writes.items():
        assert sum(len(write.rows) for write in writes) == rows[width]
        assert all(write.rows.shape[1:] == (2, width) for write in writes)
    allocator.check_integrity()
