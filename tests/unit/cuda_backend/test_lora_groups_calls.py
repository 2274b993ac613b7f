"""Calls of kernels of few adapters: gate and up, multiplied, and maps of several widths."""

import dataclasses

import jax.numpy as jnp
import pytest
from support.cases.lora_calls import D_IN, D_OUT, SITES, TABLES, added, array, batch, calls_of

from cuda_backend import lora_gated, lora_groups, lora_joined, lora_tiles
from lora_jax.ops.adapter_items import AdapterItems


def gated(rows: int, items: AdapterItems | None = None, **options):
    """Return the calls of an MLP's gate and up with their adapters."""
    given = dataclasses.replace(batch(rows, sites=(SITES,), **options), items=items)
    dtype = options.get("dtype", jnp.bfloat16)

    def run(ys, real, given):
        return lora_gated.lora_silu_times(*ys, real, given, (2, 0))

    return calls_of(run, added(rows, 2, dtype), array(dtype=jnp.int32), given)


def test_gate_and_up_of_few_rows_are_one_launch_that_changes_neither(on_hopper):
    calls = gated(20, max_rank=12)
    (items,), (call,) = calls["row_items"], calls["lora_gated"]
    pools = f"20x{D_IN}xbf16", f"50x{D_IN}xbf16", f"50x{D_OUT}xbf16"
    tables = tuple(f"{SITES}x{table}" for table in TABLES)
    products = (f"20x{D_OUT}xbf16",) * 2
    assert call.operands == (*pools, *items.results, *products, *tables, "1xi32")
    assert call.results == ("2x20x16xbf16", f"20x{D_OUT}xbf16")
    assert call.attributes == {"sites": [2, 0], "max_rank": 12}
    assert call.aliases == {}
    assert set(calls) == {"row_items", "lora_gated"}


def tiled(rows: int, **changes) -> AdapterItems:
    """Return shapes of items of which some may be in tiles."""
    integers = lambda *shape: array(*shape, dtype=jnp.int32)  # noqa: E731
    listed = integers(rows), integers(rows, 4), integers(1)
    tiles = lora_tiles.Tiles(*listed[1:], integers(9, lora_tiles.RECORD), integers(4))
    return AdapterItems(integers(rows), *listed, tiles, **{"max_rank": 16, **changes})


def test_gate_and_up_of_many_rows_have_tiles_added_where_they_are_multiplied(on_hopper):
    calls = gated(2048, tiled(2048))
    (call,) = calls["lora_gated_tiles"]
    products = (f"2048x{D_OUT}xbf16",) * 2
    tables = tuple(f"{SITES}x{table}" for table in TABLES)
    listed = "2048xi32", "2048x4xi32", "1xi32", f"9x{lora_tiles.RECORD}xi32", "4xi32"
    assert call.operands[3:] == (*listed, *products, *tables, "1xi32")
    assert call.results == ("4x2048x16xbf16", *products, products[0])
    assert call.aliases == {8: 1, 9: 2}  # where the items' adapters are added
    assert set(calls) == {"lora_gated_tiles"}


@pytest.mark.parametrize(
    ("rows", "changes", "why"),
    [
        (2048, {"in_order": True}, "not of experts"),
        (8200, {}, "up to 8192 rows and ranks to 32, not 8200 and 16"),
    ],
    ids=["experts", "rows"],
)
def test_tiles_of_other_rows_are_for_other_launches(on_hopper, rows, changes, why):
    with pytest.raises(NotImplementedError, match=why):
        gated(rows, tiled(rows, **changes))


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((257, 64, [64], 2, 16), "256 rows of up to 16 slots, not 257 of 2"),
        ((8, 64, [64], 17, 16), "not 8 of 17"),
        ((8, 64, [64], 2, 72), "ranks to 64 and d_in to 8192, not 72 and 64"),
        ((8, 8256, [64], 2, 16), "not 16 and 8256"),
        ((8, 64, [64, 96], 2, 16), r"widths in steps of 64, not \[96\]"),
        ((256, 64, [64] * 2, 16, 32), "up to 128 units of 16 ranks .* not 192"),
        ((8, 64, [28672] * 2, 16, 16), "7392 blocks of 64 columns, not 16 and 14336"),
    ],
    ids=["rows", "slots", "ranks", "d_in", "width", "units", "blocks"],
)
def test_rows_of_other_sizes_are_for_other_launches(sizes, why):
    with pytest.raises(NotImplementedError, match=why):
        lora_groups.check_few(*sizes)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": jnp.float32}, "takes bfloat16, not float32"),
        ({"tail": 16}, "takes bfloat16, not int8"),
        ({"d_in": 96}, r"widths in steps of 64, not \[96\]"),
    ],
    ids=["float32", "8 bits", "width"],
)
def test_gate_and_up_of_other_kinds_are_for_other_launches(on_hopper, options, why):
    with pytest.raises(NotImplementedError, match=why):
        gated(20, **options)


def test_long_or_experts_items_of_gate_and_up_are_for_other_launches():
    row, none = jnp.zeros(256, jnp.int32), jnp.zeros((256, 4), jnp.int32)
    known = {"max_rank": 16, "most_runs": 16}
    assert lora_groups.are_small(AdapterItems(row, row, none, row[:1], **known), 16, 16)
    for other in ({"in_order": True}, {"most_runs": 17}):
        items = AdapterItems(row, row, none, row[:1], **known | other)
        assert not lora_groups.are_small(items, 16, 16)


def joined(rows: int, widths: tuple[int, ...], dtype=jnp.bfloat16):
    """Return the calls of maps of these widths with their adapters."""
    ys, pools = ([array(n, w, dtype=dtype) for w in widths] for n in (rows, 50))
    run = lambda ys, pools, given: lora_joined.joined_lora(ys, pools, given, (2, 0, 1))  # noqa: E731
    return calls_of(run, ys, pools, batch(rows, sites=(SITES,)))


def test_few_rows_of_several_widths_are_one_launch_in_place(on_hopper):
    calls = joined(20, (192, 64, 64))
    (items,), (call,) = calls["row_items"], calls["lora_joined"]
    tables = tuple(f"{SITES}x{table}" for table in TABLES)
    maps = [f"{n}x{width}xbf16" for width in (192, 64, 64) for n in (20, 50)]
    pools = f"20x{D_IN}xbf16", f"50x{D_IN}xbf16"
    assert call.operands == (*pools, *items.results, *tables, *maps)
    assert call.results == ("3x20x16xbf16", *maps[::2])
    assert call.attributes == {"sites": [2, 0, 1], "max_rank": 16}
    assert call.aliases == {7: 1, 9: 2, 11: 3}


@pytest.mark.parametrize(
    ("widths", "dtype", "why"),
    [((64,) * 5, jnp.bfloat16, "4 maps, not 5"), ((192, 64, 64), jnp.float32, "not float32")],
    ids=["maps", "dtype"],
)
def test_other_maps_of_several_widths_are_a_launch_each(on_hopper, widths, dtype, why):
    with pytest.raises(NotImplementedError, match=why):
        joined(20, widths, dtype)
