"""Device size of an adapter, with shared matrices counted once."""

import dataclasses

import ml_dtypes
import numpy as np
from support.cases import adapter_cases as cases
from support.processes.server_process import ROOT

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.weights import AdapterWeights, SiteWeights
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from lora_jax.rank_rows import INT8, parts


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


def test_matrices_in_one_block_are_the_same_and_go_on_being_shared():
    rng = np.random.default_rng(0)

    def matrix(width, dtype: type = np.float32):
        return rng.standard_normal((1, 3, width), np.float32).astype(dtype)

    shared = matrix(16)
    sites = {
        ("gate_proj", 0): SiteWeights(shared, matrix(12), 1.0),
        ("up_proj", 0): SiteWeights(shared, matrix(5, np.float16), 2.0),  # not whole words
        ("up_proj", 1): SiteWeights(matrix(16), matrix(12), 0.5),
    }
    weights = AdapterWeights(sites, cases.weights(cases.moe(), 1).report)
    packed = weights.in_one_block()
    assert packed.sites["gate_proj", 0].a is packed.sites["up_proj", 0].a
    assert packed.demand == weights.demand
    assert len({id(one.base) for one in packed.matrices()}) == 1
    for key, site in sites.items():
        assert packed.sites[key].scaling == site.scaling
        for got, want in ((packed.sites[key].a, site.a), (packed.sites[key].b, site.b)):
            assert (got.dtype, got.flags.aligned) == (want.dtype, True)
            np.testing.assert_array_equal(got, want)
    assert packed.in_one_block() is packed
    part = AdapterWeights({("up_proj", 1): packed.sites["up_proj", 1]}, packed.report)
    assert part.in_one_block() is not part  # or a part of an adapter would keep all of its bytes
    wide = [one for one in packed.matrices() if one.shape[-1] == 16]
    assert wide[0].ctypes.data + wide[0].nbytes == wide[1].ctypes.data


def test_narrowed_rows_are_the_rounded_ones_and_narrower_ones_stay():
    rng = np.random.default_rng(0)
    shared, half = rng.standard_normal((2, 1, 3, 16), np.float32)
    sites = {
        ("gate_proj", 0): SiteWeights(shared, half.astype(np.float16), 1.0),
        ("up_proj", 0): SiteWeights(shared, half, 2.0),
    }
    weights = AdapterWeights(sites, cases.weights(cases.moe(), 1).report)
    narrow = weights.narrowed(np.dtype(ml_dtypes.bfloat16))
    one, other = narrow.sites["gate_proj", 0], narrow.sites["up_proj", 0]
    assert one.a is other.a
    assert one.b is sites["gate_proj", 0].b
    np.testing.assert_array_equal(other.b, half.astype(ml_dtypes.bfloat16))
    assert narrow.report.weight_bytes == 3 * half.size * 2
    assert narrow.demand == weights.demand
    assert narrow.narrowed(np.dtype(np.float32)) is narrow


def test_report_is_json():
    report = cases.weights(cases.llama(), 2).report
    assert dataclasses.replace(report, warnings=("w",)).as_json()["warnings"] == ("w",)


def test_rows_in_8_bits_change_shipped_adapters_by_less_than_a_hundredth():
    """Error of B A over its norm: at most 1% on average over all sites, and hardly more on any."""
    folders = sorted((ROOT / "assets/tiny-moe/adapters").iterdir())
    config = read_config(ROOT / "assets/tiny-moe")
    catalogue = model_class(config.model_type).catalogue(config)
    errors = []
    for folder in folders:
        weights = peft_format.read(folder, catalogue)
        coded = weights.in_8_bits()
        assert coded.demand == weights.demand
        assert coded.report.weight_bytes < 0.58 * 2 * sum(m.size for m in weights.matrices())
        for key, site in weights.sites.items():
            for expert in range(max(len(site.a), len(site.b))):
                want, got = (product(s, expert) for s in (site, coded.sites[key]))
                errors.append(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert len(errors) > 300
    assert np.mean(errors) < 0.01
    assert np.max(errors) < 0.015


def product(site: SiteWeights, expert: int) -> np.ndarray:
    """Return B A of one expert in float32."""
    a, b = (m[min(expert, len(m) - 1)] for m in (site.a, site.b))
    if a.dtype == INT8:
        a, b = (values * scales[:, None] for values, scales in (parts(a), parts(b)))
    return b.astype(np.float32).T @ a.astype(np.float32)
