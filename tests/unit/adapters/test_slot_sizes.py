"""Rank rows of one adapter and of all, within a budget."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.slot_sizes import rows_per_adapter, size_slots

CATALOGUE = cases.moe(layers=2)


@pytest.mark.parametrize("catalogue", [cases.llama(layers=2), CATALOGUE, cases.deepseek_v2()])
def test_spec_holds_full_adapters_exactly(catalogue):
    weights = cases.weights(catalogue, 3)
    if catalogue.kv_b_heads:  # as the reader makes it: both sites hold one A
        for layer in (0, 1):
            shared = np.zeros((1, 3, cases.LATENT), np.float32)
            k, v = weights.sites["kv_b_proj.k", layer], weights.sites["kv_b_proj.v", layer]
            weights.sites["kv_b_proj.k", layer] = type(k)(k.a, shared, 1.0)
            weights.sites["kv_b_proj.v", layer] = type(v)(shared, v.b, 1.0)
    assert rows_per_adapter(catalogue, 3) == weights.rows_by_width()
    assert size_slots(catalogue, 5, 3, 4).rows == {
        width: 5 * count for width, count in weights.rows_by_width().items()
    }


def test_where_memory_is_short_the_experts_rows_shrink_first():
    catalogue = cases.moe(layers=2)
    dense = rows_per_adapter(catalogue.without_experts(), 8)
    one = rows_per_adapter(catalogue, 8)

    def size(rows):
        return sum(width * count for width, count in rows.items()) * 2

    experts = {width: one[width] - dense.get(width, 0) for width in one}
    assert size(experts) > size(dense) > 0
    budget = 10 * size(dense) + 3 * size(experts)
    rows = size_slots(catalogue, 10, 8, 2, byte_budget=budget).rows
    assert rows == {width: 10 * dense.get(width, 0) + 3 * experts[width] for width in one}
    assert size(size_slots(catalogue, 10, 8, 2, byte_budget=budget + 1).rows) <= budget + 1
    # No room for all adapters' dense rows and one adapter's experts: all shrink evenly.
    rows = size_slots(catalogue, 1000, 8, 2, byte_budget=2 * size(one)).rows
    assert rows == {width: 2 * count for width, count in one.items()}


def test_byte_budget():
    one = sum(w * n for w, n in rows_per_adapter(CATALOGUE, 8).items()) * 2
    spec = size_slots(CATALOGUE, 100, 8, 2, byte_budget=3 * one)
    assert spec.num_slots == 100
    assert spec.rows == {w: 3 * n for w, n in rows_per_adapter(CATALOGUE, 8).items()}
    assert size_slots(CATALOGUE, 2, 8, 2, byte_budget=10**12) == size_slots(CATALOGUE, 2, 8, 2)
    with pytest.raises(ValueError, match=rf"takes {one} bytes; the budget for adapters is 7"):
        size_slots(CATALOGUE, 2, 8, 2, byte_budget=7)
    with pytest.raises(ValueError, match="at least 1 slot and rank 1, not 0 and 8"):
        size_slots(CATALOGUE, 0, 8, 2)
