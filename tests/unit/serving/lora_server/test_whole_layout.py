"""Sites of one process that holds every adapter of an engine whole."""

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.processes.server_process import ROOT

from serving.lora_server import whole_layout
from serving.lora_server.whole_layout import WholeLayout

MODEL = str(ROOT / "assets" / "tiny-moe")


@pytest.fixture(scope="module")
def layout() -> WholeLayout:
    return WholeLayout(MODEL)


def test_sites_are_the_linear_maps_of_a_layer(layout):
    assert set(layout.sites) == {
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("experts.gate_proj", "experts.up_proj"),
        ("experts.down_proj",),
    }
    assert layout.has("q_proj", 3)
    assert not layout.has("lm_head", 0)
    assert layout.mask(["v_proj", "q_proj"]) == 1 << layout.site(("q_proj", "k_proj", "v_proj"))


def test_the_only_rank_holds_all_of_them(layout):
    shard = layout.shard
    assert (shard.rank, shard.first_expert) == (0, 0)
    assert shard.layers == tuple(range(layout.num_layers))
    assert shard.expert_slice == slice(0, layout.num_experts)
    assert set(shard.catalogue(layout.catalogue).modules) == set(shard.modules)


def test_a_model_without_experts_has_sites_too(tmp_path):
    tiny_checkpoint.write_model(tmp_path, TinyShape())
    dense = WholeLayout(str(tmp_path))
    assert ("gate_proj", "up_proj") in dense.sites
    assert (dense.num_experts, dense.top_k) == (1, 1)
    terms = dense.terms(16, "float32", 4)
    assert terms.shapes.layers == dense.num_layers
    assert terms.placement.devices == 1


def test_other_modules_are_refused_by_name(layout):
    with pytest.raises(ValueError, match=r"law changes lm_head, router, which .*q_proj.*'process'"):
        layout.check("law", ["router", "q_proj", "lm_head"])
    layout.check("law", ["q_proj", "experts.down_proj"])


def test_a_model_of_more_sites_than_kernels_take_is_refused(monkeypatch):
    monkeypatch.setattr(whole_layout, "MOST_SITES", 3)
    with pytest.raises(ValueError, match=r"has 4 sites .* computes 1 to 3: use isolation"):
        WholeLayout(MODEL)
