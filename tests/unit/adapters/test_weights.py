"""Device size of an adapter, with shared matrices counted once."""

import dataclasses

import numpy as np
from support.cases import adapter_cases as cases

from lora_jax.adapters.weights import AdapterWeights, SiteWeights


def test_shared_matrices_are_counted_once():
    a, report = np.zeros((3, 2, 16), np.float32), cases.weights(cases.moe(), 1).report
    sites = {
        ("experts.gate_proj", 0): SiteWeights(a, np.zeros((3, 2, 12), np.float32), 1.0),
        ("experts.up_proj", 0): SiteWeights(a, np.zeros((3, 2, 12), np.float32), 1.0),
        ("q_proj", 0): SiteWeights(
            np.zeros((1, 4, 16), np.float32), np.zeros((1, 4, 16), np.float32), 1.0
        ),
    }
    weights = AdapterWeights(sites, report)
    assert len(list(weights.matrices())) == 5
    assert weights.rows_by_width() == {16: 6 + 4 + 4, 12: 12}
    assert [(m.shape[2], m.shape[0] * m.shape[1]) for m in weights.matrices()] == list(
        weights.demand
    )
    assert sites["q_proj", 0].rank == 4


def test_report_is_json():
    report = cases.weights(cases.llama(), 2).report
    assert dataclasses.replace(report, warnings=("w",)).as_json()["warnings"] == ("w",)
