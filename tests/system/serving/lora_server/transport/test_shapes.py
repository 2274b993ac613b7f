"""Slots hold what they must: nothing overlaps, everything is aligned, the sizes are checked."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.lora_server.transport.shapes import (
    DOWN,
    GATE_UP,
    OUT,
    PAGE,
    QKV,
    Shapes,
    Site,
    moe_shapes,
)

SITES = st.lists(
    st.builds(
        Site,
        st.just("s"),
        st.integers(1, 70),
        st.lists(st.integers(1, 70), min_size=1, max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
PAIRS = st.sampled_from([("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])


@settings(deadline=None)
@given(SITES, st.integers(1, 300), PAIRS)
def test_nothing_overlaps(sites, rows, dtypes):
    shapes = Shapes(2, rows, *dtypes, sites)
    widest = max(site.d_in for site in sites)
    parts = [
        (0, 64),
        (shapes.adapters_offset, 4 * rows),
        (shapes.experts_offset, 4 * rows),
        (shapes.rows_offset, rows * widest * shapes.row_dtype.itemsize),
    ]
    check_parts(parts, shapes.request_slot)
    for index, site in enumerate(sites):
        sizes = [rows * width * shapes.result_dtype.itemsize for width in site.d_outs]
        parts = [(0, 64), *zip(shapes.result_offsets(index), sizes, strict=True)]
        check_parts(parts, shapes.response_slot)
        assert shapes.response_bytes(index, rows) == sum(sizes)
        assert shapes.request_bytes(index, 3) == 3 * (8 + site.d_in * shapes.row_dtype.itemsize)
    assert shapes.channel_bytes == PAGE + shapes.request_slot + shapes.response_slot


def check_parts(parts, slot_bytes):
    for (start, size), (following, _) in itertools.pairwise(parts):
        assert start + size <= following
        assert following % 64 == 0
    assert sum(parts[-1]) <= slot_bytes
    assert slot_bytes % PAGE == 0


def test_sites_of_experts():
    shapes = moe_shapes(3, 8, hidden=32, width=48, dtype="bfloat16")
    assert shapes.sites[GATE_UP] == Site("gate_up", 32, (48, 48))
    assert shapes.sites[DOWN] == Site("down", 48, (32,))
    assert (shapes.layers, shapes.delta_dtype, len(shapes.sites)) == (3, "float32", 2)
    more = moe_shapes(3, 8, hidden=32, width=48, dtype="bfloat16", attention=(64, 16))
    assert more.sites[:2] == shapes.sites
    assert more.sites[QKV] == Site("qkv", 32, (64, 16, 16))
    assert more.sites[OUT] == Site("out", 64, (32,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"max_rows": -1}, "max_rows must be at least 1"),
        ({"sites": ()}, "sites must be at least 1"),
        ({"sites": (Site("q", 0, (1,)),)}, r"q.d_in must be at least 1"),
        ({"sites": (Site("q", 1, ()),)}, r"q.d_outs must be at least 1"),
        ({"dtype": "float16"}, "dtype 'float16' is not one of float32, bfloat16"),
        ({"dtype": "float32", "delta_dtype": "bfloat16"}, "must be float32"),
    ],
)
def test_bad_sizes_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(moe_shapes(3, 8, 32, 48, "bfloat16"), **change)
