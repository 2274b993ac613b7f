"""Cases: popularities mean what they say, real models' sizes hang together."""

import numpy as np
import pytest

from lora_jax.ops.cases import MODELS, POPULARITIES, attention_case, grouped_case, popular


def test_popularities():
    rng = np.random.default_rng(0)
    ids = {name: popular(name, 1000, 50, rng) for name in POPULARITIES}
    counts = {name: np.bincount(i[i >= 0], minlength=50) for name, i in ids.items()}
    assert counts["identical"][0] == 1000
    assert (counts["distinct"] == 20).all()
    assert counts["none"].sum() == 0
    assert 450 < counts["skewed"][0] < 570
    assert counts["zipf"][0] > 3 * counts["zipf"][4] > 0
    assert counts["uniform"].min() > 0
    with pytest.raises(ValueError, match="'rare' is not one of"):
        popular("rare", 1, 1, rng)


def test_the_same_seed_gives_the_same_case():
    one, same, other = (grouped_case(5, 2, 3, 4, seed=seed) for seed in (7, 7, 8))
    assert (one.x == same.x).all()
    assert not (one.x == other.x).all()


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS)
def test_heads_fit_together(shape):
    assert shape.q_heads % shape.kv_heads == 0
    assert shape.v_dim <= shape.k_dim
    assert shape.top_k <= shape.num_experts
    assert (shape.kv_heads == 1) or not shape.latent


def test_unwritten_pages_hold_nan_and_written_ones_do_not():
    case = attention_case(MODELS["tiny"], ((1, 2, 3), (0, 0, 6)), page_size=4)
    k = np.asarray(case.k_pages)
    table = np.asarray(case.block_tables)
    assert np.isfinite(k[table[1, 0], :4]).all()
    assert np.isfinite(k[table[1, 1], 0]).all()
    assert np.isnan(k[table[1, 1], 1:]).all()
