"""Adapters of a config alone: their shapes are the model's, their bytes those of one bank."""

import json

import ml_dtypes
import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.dummy import DummyAdapters
from lora_jax.adapters.reader import CONFIG_FILES, AdapterReadLimits

CATALOGUE = cases.moe(experts=4, layers=2)
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}


def write(folder, **changes):
    folder.mkdir()
    (folder / CONFIG_FILES[0]).write_text(json.dumps(CONFIG | changes))
    return folder


def test_every_site_of_the_target_modules_has_matrices_of_its_own(tmp_path):
    made = DummyAdapters(1 << 16).read(write(tmp_path / "a"), CATALOGUE)
    wanted = {
        n: m for n, m in CATALOGUE.modules.items() if n.split(".")[-1] in ("q_proj", "up_proj")
    }
    assert set(made.sites) == {(n, layer) for n, m in wanted.items() for layer in m.layers}
    for (name, _), site in made.sites.items():
        module, experts = wanted[name], max(wanted[name].num_experts, 1)
        assert site.a.shape == (experts, 3, module.d_in)
        assert site.b.shape == (experts, 3, module.d_out)
        assert site.a.dtype == ml_dtypes.bfloat16
        assert site.scaling == 2.0
        assert 0.5 < np.abs(site.a.astype("f4")).max() * 32 <= 1
    values = [matrix.astype("f4").tobytes() for matrix in made.matrices()]
    assert len({*values}) == len(values) == 2 * len(made.sites)
    assert made.report.max_rank == 3
    assert made.report.weight_bytes == sum(matrix.nbytes for matrix in made.matrices())


def test_adapters_share_their_bytes_and_differ_by_their_configs(tmp_path):
    dummies = DummyAdapters(1 << 16)
    one = dummies.read(write(tmp_path / "a"), CATALOGUE)
    two = dummies.read(write(tmp_path / "b", lora_alpha=9), CATALOGUE)
    again = DummyAdapters(1 << 16).read(tmp_path / "a", CATALOGUE)
    assert one.digest == again.digest != two.digest
    assert one.in_one_block() is one, "a host that pins its adapters would copy it"
    wide = dummies.read(write(tmp_path / "c", r=4), CATALOGUE)
    for site in one.sites:
        assert one.sites[site].a is two.sites[site].a
        assert (one.sites[site].scaling, two.sites[site].scaling) == (2.0, 3.0)
        assert not np.shares_memory(one.sites[site].a, wide.sites[site].a)
        np.testing.assert_array_equal(one.sites[site].b, again.sites[site].b)


def test_what_has_weights_is_read_and_what_cannot_be_made_is_refused(tmp_path):
    folder = tmp_path / "real"
    cases.write_adapter(folder, cases.dense_tensors())
    assert DummyAdapters(8).read(folder, cases.llama()).report.file_bytes > 0
    with pytest.raises(ValueError, match="larger than the bank"):
        DummyAdapters(8).read(write(tmp_path / "a"), CATALOGUE)
    with pytest.raises(ValueError, match="no target module"):
        DummyAdapters(8).read(write(tmp_path / "b", target_modules=["x"]), CATALOGUE)
    with pytest.raises(ValueError, match=r"adapter_config\.json: use_dora"):
        DummyAdapters(8).read(write(tmp_path / "c", use_dora=True), CATALOGUE)
    limits = AdapterReadLimits(max_rank=2)
    with pytest.raises(ValueError, match=r"rank 3 of .* above the limit of 2"):
        DummyAdapters(1 << 16).read(tmp_path / "a", CATALOGUE, limits=limits)
