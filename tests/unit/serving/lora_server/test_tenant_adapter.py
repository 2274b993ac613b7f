"""Adapters that a tenant computes: the table of its matrices, and what is refused."""

import numpy as np
import pytest
from support.processes.server_process import ROOT

from lora_jax.adapters import reader
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving.lora_server.tenant_adapter import _maps, layout_of, open_tenant

MODEL = ROOT / "assets" / "tiny-moe"
ADAPTERS, OTHERS = MODEL / "adapters", ROOT / "assets" / "tiny-vl" / "adapters"


def test_the_table_holds_every_matrix_of_the_adapter_at_its_place():
    config = read_config(MODEL)
    weights = reader.read(ADAPTERS / "law", model_class(config.model_type).catalogue(config))
    layout = layout_of(str(MODEL))
    maps, keep = _maps(layout, layout.shapes(8, "float32"), weights)
    outputs = [name for site in layout.sites for name in site]
    for (name, layer), site in weights.sites.items():
        found = maps[layer, outputs.index(name)]
        assert found["rank"] == site.rank
        assert found["scaling"] == np.float32(site.scaling)
        assert found["a_rows"] == site.a.shape[0] * site.a.shape[1]
        assert found["a_stride"] == (0 if site.a.shape[0] == 1 else site.rank)
        at = next(m for m in keep if m.ctypes.data == found["b"])
        np.testing.assert_array_equal(at, site.b.astype(np.float32))
    assert np.count_nonzero(maps["rank"]) == len(weights.sites)


def test_what_a_tenant_does_not_compute_is_refused_by_name():
    esft = next((MODEL / "esft").iterdir())
    with pytest.raises(ValueError, match=f"{esft.name} is no plain LoRA.*'process'"):
        open_tenant(str(MODEL), str(esft), 16, 8, "float32")
    with pytest.raises(ValueError, match=r"intent has a task head: .*'process'"):
        open_tenant(str(MODEL), str(MODEL / "heads" / "intent"), 16, 8, "float32")


def test_an_adapter_of_another_base_and_one_above_the_rank_are_refused():
    with pytest.raises(ValueError, match=r"is \[|shape|no module|not a module"):
        open_tenant(str(MODEL), str(OTHERS / "flags"), 16, 8, "float32")
    with pytest.raises(FileNotFoundError, match="nobody"):
        open_tenant(str(MODEL), str(ADAPTERS / "nobody"), 16, 8, "float32")
    with pytest.raises(ValueError, match="rank"):
        open_tenant(str(MODEL), str(ADAPTERS / "law"), 4, 8, "float32")
