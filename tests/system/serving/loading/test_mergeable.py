"""Adapters that merged weights can hold, and the reasons for refusing others."""

import logging

import numpy as np
import pytest
from support.cases.adapter_cases import llama, moe, site_delta, weights
from support.cases.head_cases import write_head

from lora_jax.adapters.formats.peft_format import read
from lora_jax.adapters.task_head import with_head
from serving.loading.mergeable import Mergeable, delta_norm

MAPS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def norms(value: float) -> dict:
    return {(module, 0): value for module in MAPS}


def test_norm_of_a_product_is_that_of_the_matrix():
    for site in weights(llama(), 3, seed=2).sites.values():
        want = np.linalg.norm(site_delta(site)[0])
        assert delta_norm(site) == pytest.approx(float(want), rel=1e-5)


def test_adapters_of_dense_maps_can_be_merged():
    assert Mergeable(norms(1e9), mixture=True).holds(weights(llama(), 2, names=MAPS))


def test_others_are_named_once(caplog):
    mergeable = Mergeable(norms(1e9), mixture=True)
    adapter = weights(moe(), 2)
    with caplog.at_level(logging.INFO):
        assert [mergeable.holds(adapter), mergeable.holds(adapter)] == [False, False]
    assert len(caplog.records) == 1
    assert "experts.down_proj" in caplog.text
    assert "is never merged" in caplog.text


def test_an_adapter_with_a_task_head_is_never_merged(tmp_path):
    write_head(tmp_path / "h", ["a", "b"], np.ones((2, 16)))
    adapter = read(tmp_path / "h", with_head(llama(), 16, 2))
    assert "changes score" in Mergeable(norms(1e9), mixture=True).why_not(adapter)


def test_one_larger_than_the_weights_is_merged_for_itself_only():
    adapter = weights(llama(), 2, names=MAPS)
    assert "larger than the weights" in Mergeable(norms(0.1), mixture=True).why_not(adapter)
    assert Mergeable(norms(0.1), mixture=False).holds(adapter)
