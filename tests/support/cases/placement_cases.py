"""Popularities, and the admission rate of InfiniLoRA's Eq. 4 from its definition."""

import itertools

import numpy as np
from hypothesis import strategies as st

from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape


def zipf(adapters: int, exponent: float) -> np.ndarray:
    """Popularities that fall as rank ** -exponent."""
    weights = np.arange(1, adapters + 1.0) ** -exponent
    return weights / weights.sum()


def enumerated_rate(popularity, resident, capacity: int) -> float:
    """Eq. 4 summed over every request and every set of resident adapters."""
    rate = 0.0
    for present in itertools.product((0, 1), repeat=len(resident)):
        chance = np.prod([q if here else 1 - q for q, here in zip(resident, present, strict=True)])
        for adapter, p in enumerate(popularity):
            others = sum(present) - present[adapter]
            rate += chance * p * (present[adapter] or others <= capacity - 1)
    return float(rate)


def rate_by_sums(popularity, resident, capacity: int) -> float:
    """Eq. 4 by a dynamic programme over (residents, popularity of the absent): exact, O(N M)."""
    chance, absent = np.zeros(capacity + 1), np.zeros(capacity + 1)
    chance[0] = 1.0
    for p, q in zip(popularity, resident, strict=True):
        step = absent * (1 - q) + p * (1 - q) * chance
        step[1:] += q * absent[:-1]
        chance[1:] = chance[1:] * (1 - q) + chance[:-1] * q
        chance[0] *= 1 - q
        absent = step
    return float(np.dot(popularity, resident) + absent[:capacity].sum())


@st.composite
def shapes(draw) -> AdapterShape:
    """Small blocks of adapters."""
    return AdapterShape(
        adapters=draw(st.integers(1, 9)),
        layers=draw(st.integers(1, 7)),
        experts=draw(st.sampled_from([1, 2, 4, 6, 8, 12])),
        unit_bytes=draw(st.integers(1, 100)),
    )


@st.composite
def layouts(draw) -> ServerLayout:
    """Placements of small blocks."""
    shape = draw(shapes())
    if draw(st.booleans()):
        return ServerLayout(shape, dp=draw(st.integers(1, shape.adapters)))
    ep = draw(st.sampled_from([x for x in range(1, 13) if shape.experts % x == 0]))
    return ServerLayout(shape, ep=ep, pp=draw(st.integers(1, shape.layers)))


@st.composite
def popularities(draw, largest: int = 7) -> np.ndarray:
    """Popularities of a few adapters, some of them 0 or equal."""
    count = st.integers(1, largest)
    weights = np.array(
        draw(count.flatmap(lambda n: st.lists(st.integers(0, 50), min_size=n, max_size=n))),
        np.float64,
    )
    weights[0] += 1
    return weights / weights.sum()
