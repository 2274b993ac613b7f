"""Inputs for tests and benchmarks of weight memory: real experts, and how many adapters replace.

The counts per layer are drawn, since only their maximum and sum are published; the same every time.
"""

import numpy as np

# ExpertWeave, Table 1: the most experts of a layer, and all 26 layers' (avg x 26), per adapter.
TABLE_1 = {
    "gate-math": (12, 183),
    "token-math": (9, 159),
    "gate-intent": (12, 247),
    "token-intent": (8, 185),
    "gate-summary": (11, 201),
    "token-summary": (8, 134),
    "gate-law": (12, 191),
    "token-law": (10, 171),
    "gate-translation": (13, 122),
    "token-translation": (6, 100),
}
# In which benchmarks load them: the three of section 5.4, then the rest as printed.
ORDER = (
    "gate-math",
    "gate-intent",
    *(name for name in TABLE_1 if name not in ("gate-math", "gate-intent")),
)
# DeepSeek-V2-Lite: layers with experts, experts of one, the most that an adapter replaces in one.
LAYERS, BASE, E_MAX = 26, 64, 13
PROJECTIONS = ((1408, 2048), (1408, 2048), (2048, 1408))  # gate, up, down
PAGE = 2 << 20
EXPERT_BYTES = sum(d_out * d_in * 2 for d_out, d_in in PROJECTIONS)  # bfloat16


def layer_counts(most: int, total: int, seed: int) -> np.ndarray:
    """Return experts per layer i64 [LAYERS], at random but with this maximum and this sum."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(LAYERS, np.int64)
    counts[rng.integers(LAYERS)] = most
    while counts.sum() < total:
        layer = rng.integers(LAYERS)
        counts[layer] += counts[layer] < most
    return counts


def table_1_counts() -> dict[str, np.ndarray]:
    """Return experts per layer of each adapter of Table 1."""
    return {
        name: layer_counts(most, total, seed)
        for seed, (name, (most, total)) in enumerate(TABLE_1.items())
    }
