"""The share of prompt tokens that the prefix cache gave."""

import pytest

from serving.engine.metrics.stats import EngineStats


@pytest.mark.parametrize("queries", [0, 8])
def test_hit_rate(queries):
    stats = EngineStats(prefix_queries=queries, prefix_hits=queries // 4)
    assert stats.prefix_hit_rate == (0.25 if queries else 0.0)
