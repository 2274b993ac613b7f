"""Table 1 of InfiniLoRA: what is counted on the layout equals the table's formulas."""

import numpy as np
import pytest

from lora_jax.placement.ep_pp import ServerLayout, data_parallel, expert_parallel, pipeline_parallel
from lora_jax.placement.metrics import LayerCost, layer_cost, traffic
from lora_jax.placement.shape import AdapterShape

SHAPE = AdapterShape(adapters=16, layers=8, experts=16, unit_bytes=1)
BATCH, TOP_K = 128, 4
POWERS = [1, 2, 4, 8]


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("m", POWERS)
def test_table_1_simple_strategies(m, p):
    bk = float(BATCH * TOP_K)
    got = {
        "DP": layer_cost(data_parallel(SHAPE, m), BATCH, TOP_K, p),
        "PP": layer_cost(pipeline_parallel(SHAPE, m), BATCH, TOP_K, p),
        "EP": layer_cost(expert_parallel(SHAPE, m), BATCH, TOP_K, p),
    }
    assert got == {
        "DP": LayerCost(bk / (p * m), m, p, bk / m, m),
        "PP": LayerCost(bk / p, 1, p, bk, 1),
        "EP": LayerCost(bk / max(p, m), max(m // p, 1), max(p // m, 1), bk / m, m),
    }


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("x", POWERS)
@pytest.mark.parametrize("y", [1, 2, 3, 8])
def test_table_1_hybrid(x, y, p):
    bk = float(BATCH * TOP_K)
    want = LayerCost(bk / max(p, x), max(x // p, 1), max(p // x, 1), bk / x, x)
    assert layer_cost(ServerLayout(SHAPE, ep=x, pp=y), BATCH, TOP_K, p) == want


@pytest.mark.parametrize("layer", range(8))
def test_only_the_layers_group_gets_activations(layer):
    layout = ServerLayout(SHAPE, ep=2, pp=3)
    sent = traffic(layout, BATCH, TOP_K, 2, layer)
    assert sent.sum() == BATCH * TOP_K
    assert np.flatnonzero(sent.sum(axis=0)).tolist() == list(layout.group_of(layer))


def test_uneven_adapters_keep_the_means_of_table_1():
    shape = AdapterShape(adapters=7, layers=1, experts=4, unit_bytes=1)
    got = layer_cost(data_parallel(shape, 3), 84, 1, 2)
    assert (got.peer_volume, got.compute_volume) == pytest.approx((84 / 6, 84 / 3))
    loads = traffic(data_parallel(shape, 3), 84, 1, 2).sum(axis=0)
    np.testing.assert_allclose(loads, [36, 24, 24])


def test_where_cuts_do_not_line_up_there_are_more_pairs_than_the_table_says():
    """4 ranks and 6 shards of 12 experts overlap in 4 + 6 - 2 pairs; max(p, x) would be 6."""
    shape = AdapterShape(adapters=1, layers=1, experts=12, unit_bytes=1)
    layout = ServerLayout(shape, ep=6)
    assert (traffic(layout, 12, 1, 4) > 0).sum() == 8
    with pytest.raises(ValueError, match="line up"):
        layout.require_aligned(4)


@pytest.mark.parametrize("ranks", [0, 3])
def test_ranks_that_do_not_split_the_experts_are_refused(ranks):
    with pytest.raises(ValueError, match="16 experts"):
        layer_cost(ServerLayout(SHAPE), BATCH, TOP_K, ranks)
