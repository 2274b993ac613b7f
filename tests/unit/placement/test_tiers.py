"""Hit ratios against a simulation, and the guide's share of the most popular."""

import collections

import numpy as np
import pytest

from lora_jax.placement.tiers import lru_hits, top_share, zipf


def simulated(shares, held, requests=40_000):
    rng, cache, hits = np.random.default_rng(3), collections.OrderedDict(), 0
    for adapter in rng.choice(len(shares), requests, p=shares).tolist():
        hits += adapter in cache
        cache[adapter] = None
        cache.move_to_end(adapter)
        if len(cache) > held:
            cache.popitem(last=False)
    return hits / requests


@pytest.mark.parametrize(("alpha", "held"), [(1.0, 30), (0.8, 100), (1.3, 10)])
def test_the_hit_ratio_is_that_of_a_simulation(alpha, held):
    shares = zipf(1000, alpha)
    assert lru_hits(shares, held) == pytest.approx(simulated(shares, held), abs=0.01)
    assert lru_hits(shares, held) < top_share(shares, held)


def test_the_top_30_of_1000_get_53_percent():
    """Not 80 to 85%, as the guide has it."""
    assert top_share(zipf(1000, 1.0), 30) == pytest.approx(0.534, abs=0.001)
    assert top_share(zipf(1000, 1.33), 30) == pytest.approx(0.80, abs=0.01)
    assert top_share(zipf(1000, 1.42), 30) < 0.85 < top_share(zipf(1000, 1.43), 30)


def test_ends():
    shares = zipf(10, 0.0)
    assert shares.tolist() == [0.1] * 10
    assert lru_hits(shares, 0) == 0
    assert lru_hits(shares, 10) == lru_hits(shares, 99) == 1
    for alpha in (100.0, 1000.0, 1e15):  # shares below the least float are 0
        assert lru_hits(zipf(1000, alpha), 30) == pytest.approx(1)
    assert lru_hits(shares, 4) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="at least 1 adapter"):
        zipf(0, 1.0)
