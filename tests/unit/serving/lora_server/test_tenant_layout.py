"""Sites of tenants: every module of a model, those of one x together."""

import dataclasses
from pathlib import Path

import pytest
from support.processes.server_process import ROOT

from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving.lora_server.tenant_adapter import layout_of
from serving.lora_server.tenant_layout import TenantLayout

MODEL = str(ROOT / "assets" / "tiny-moe")


@pytest.fixture(scope="module")
def layout() -> TenantLayout:
    return layout_of(MODEL)


def test_maps_of_one_x_are_one_site(layout):
    assert layout.site(("q_proj", "k_proj", "v_proj")) != layout.site(("o_proj",))
    assert ("experts.gate_proj", "experts.up_proj") in layout.sites
    assert sorted(n for site in layout.sites for n in site) == sorted(_catalogue().modules)
    with pytest.raises(ValueError, match=r"q_proj, k_proj to one x.*isolation 'process'"):
        layout.site(("q_proj", "k_proj"))


def test_all_modules_of_all_layers_are_tenants(layout):
    assert all(layout.has("q_proj", layer) for layer in range(4))
    assert layout.has("lm_head", 0)
    assert not layout.has("lm_head", 1)
    assert not layout.has("gate_proj", 0)


def test_an_adapter_has_messages_for_its_own_sites_alone(layout):
    attention, out = layout.site(("q_proj", "k_proj", "v_proj")), layout.site(("o_proj",))
    assert layout.mask(["v_proj", "q_proj"]) == 1 << attention
    assert layout.mask(["v_proj", "o_proj"]) == 1 << attention | 1 << out
    assert layout.mask([]) == 0


def test_shapes_have_a_site_per_exchange(layout):
    shapes = layout.shapes(24, "bfloat16")
    site = shapes.sites[layout.site(("q_proj", "k_proj", "v_proj"))]
    assert (site.d_in, site.d_outs) == (128, (128, 64, 64))
    assert (shapes.layers, shapes.max_rows, shapes.delta_dtype) == (4, 24, "float32")


def test_absorbed_attention_is_refused_by_name(layout):
    catalogue = dataclasses.replace(_catalogue(), kv_b_heads=(1, 2, 3))
    with pytest.raises(ValueError, match=r"absorbed attention.*isolation 'process'"):
        TenantLayout(catalogue)


def _catalogue():
    config = read_config(Path(MODEL))
    return model_class(config.model_type).catalogue(config)
