"""Calls of the LoRA kernels: how rows become items and tiles, and how many maps a launch has."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec
from support.cases.lora_calls import (
    D_IN,
    D_OUT,
    SITES,
    SLOTS,
    TABLES,
    added,
    array,
    batch,
    calls_of,
)

from cuda_backend import lora_gemm, lora_tiles, reroute
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.sharding import AXIS


def test_few_rows_are_added_in_place_by_items_of_eight(on_hopper):
    calls = calls_of(lora_gemm.lora_gemm, added(20), batch(20))
    (items,), (call,) = calls["row_items"], calls["lora_gemm"]
    assert items.attributes == {"slots": SLOTS, "item_rows": 8}
    assert items.results == ("20xi32", "20x4xi32", "1xi32")
    pools = f"20x{D_IN}xbf16", f"50x{D_IN}xbf16", f"50x{D_OUT}xbf16"
    no_tiles = f"0x{lora_tiles.RECORD}xi32", "4xi32"
    assert call.operands == (*pools, *items.results, *no_tiles, f"20x{D_OUT}xbf16", *TABLES)
    assert call.results == ("1x20x16xbf16", f"20x{D_OUT}xbf16")
    assert call.aliases == {8: 1}
    said = {"sites": [0], "max_rank": 16, "accumulate": True, "zeros_if_idle": True}
    assert call.attributes == said | {"small_items": True, "segments": False, "tiles_last": True}
    assert set(calls) == {"row_items", "lora_gemm"}


@pytest.mark.parametrize(
    ("rows", "slots", "of_item"),
    [(128, 99, 8), (129, 17, 16), (129, 16, 8), (256, 2, 8), (257, 2, 16)],
)
def test_up_to_256_rows_of_few_slots_come_in_small_items(rows, slots, of_item):
    assert lora_gemm.rows_per_item(rows, 16, num_slots=slots) == of_item


def test_items_tell_the_kernel_whether_they_are_small(on_hopper):
    """Those of experts, which stand in order, are by their rows alone."""
    for rows, small in ((256, True), (300, False)):
        (call,) = calls_of(lora_gemm.lora_gemm, added(rows), batch(rows))["lora_gemm"]
        assert call.attributes["small_items"] is small


@pytest.mark.parametrize(
    ("slots", "small"), [(lora_gemm.FEW_SLOTS, True), (17, False), (None, False)]
)
def test_items_are_as_small_as_they_were_cut_whatever_tables_a_launch_has(slots, small):
    rows = jnp.zeros(256, jnp.int32)
    none = jnp.zeros((256, 4), jnp.int32)
    items = AdapterItems(rows, rows, none, rows[:1], max_rank=16, most_runs=slots)
    assert lora_gemm.are_small(items, 256, 2, 16) is small


def test_a_part_of_a_split_step_takes_no_constant_without_elements(on_hopper):
    """XLA's compiler for GPUs crashes over one (tests/kernels/aot/test_split_step.py)."""
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()

    def step(ys, given):
        part = jax.shard_map(
            lora_gemm.lora_gemm, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )
        return part(ys, given)

    lowered = jax.jit(step).trace(added(20), batch(20)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @lora_jax_cuda_lora_gemm") == 1
    assert "dense<> : tensor<" not in text


def test_rows_of_no_y_are_not_read(on_hopper):
    none = (None, None)
    run = lambda given: lora_gemm.lora_gemm(none, given, none, zeros_if_idle=False)  # noqa: E731
    (call,) = calls_of(run, batch(20))["lora_gemm"]
    assert call.operands[8:] == TABLES * 2
    assert (len(call.results), call.aliases) == (3, {})
    assert not call.attributes["accumulate"]
    assert not call.attributes["zeros_if_idle"]


def test_six_maps_are_two_launches_of_one_list_of_items(on_hopper):
    sites = [2, 0, 1, 1, 0, 2]
    run = lambda ys, given: lora_gemm.lora_gemm(ys, given, sites)  # noqa: E731
    calls = calls_of(run, added(20, 6), batch(20, sites=(SITES,)))
    assert len(calls["row_items"]) == 1
    assert [call.attributes["sites"] for call in calls["lora_gemm"]] == [sites[:4], sites[4:]]
    first, last = calls["lora_gemm"]
    assert first.aliases == {8 + 3 * m: 1 + m for m in range(4)}
    assert last.aliases == {8: 1, 11: 2}
    assert last.operands[9:11] == (f"{SITES}x{SLOTS}x5xi32", f"{SITES}x{SLOTS}xf32")


def test_long_calls_have_tiles_beside_their_items(on_hopper):
    """Memory for h of the items and of the tiles; no more tiles than segments of 24 rows."""
    calls = calls_of(lora_gemm.lora_gemm, added(2048), batch(2048, 64))
    (tiles,), (call,) = calls["row_tiles"], calls["lora_gemm"]
    assert tiles.attributes == {"least_rows": 24, "least_total": 128}
    most = 2 * (2048 // 24) + 1
    assert tiles.results == ("2048x4xi32", "1xi32", f"{most}x{lora_tiles.RECORD}xi32", "4xi32")
    assert call.operands[4:8] == tiles.results
    assert call.results[0] == "2x2048x64xbf16"
    assert not call.attributes["tiles_last"]


def test_rows_in_8_bits_have_calls_of_their_own(on_hopper):
    calls = calls_of(lora_gemm.lora_gemm, added(20), batch(20, 20, d_in=4096, tail=16))
    (call,) = calls["lora_int8"]
    assert call.operands[1:3] == ("50x4112xi8", f"50x{D_OUT + 16}xi8")
    assert call.results == ("2x1x20x32xf32", f"20x{D_OUT}xbf16")  # parts of 2048, ranks by 16
    assert call.aliases == {6: 1}
    assert call.attributes == {"sites": [0], "max_rank": 20, "accumulate": True}
    assert "lora_gemm" not in calls


@pytest.mark.parametrize(
    ("y_dtype", "options"),
    [
        (jnp.float32, {}),
        (jnp.float32, {"dtype": jnp.float32}),
        (jnp.bfloat16, {"d_in": 100}),
        (jnp.bfloat16, {"max_rank": 129}),
    ],
    ids=["wide y", "float32", "odd width", "high rank"],
)
def test_what_tensor_cores_do_not_take_goes_row_by_row(on_hopper, y_dtype, options):
    run = lambda ys, given: lora_gemm.lora_gemm(ys, given, (None, None))  # noqa: E731
    calls = calls_of(run, added(20, 2, y_dtype), batch(20, **options))
    assert set(calls) == {"lora_rows"}
    for call in calls["lora_rows"]:
        assert call.aliases == {0: 0}
        assert call.results == call.operands[:1]
        assert call.attributes == {"site": 0, "max_rank": options.get("max_rank", 16)}


def items_of(rows: int) -> lora_gemm.CudaWorkList:
    def made(slots, experts):
        return lora_gemm.row_items(slots, experts, SLOTS, 64)

    return jax.eval_shape(made, *[array(rows, dtype=jnp.int32)] * 2)


@pytest.mark.parametrize(("rows", "tiles"), [(20, 0), (2048, 171)])
def test_shrink_and_expand_alone_take_the_tiles_too(on_hopper, rows, tiles):
    given, items = batch(rows, 64), items_of(rows)
    tables = given.entries, given.scaling
    shrink = lambda *arrays: lora_gemm.lora_shrink(*arrays, 64)  # noqa: E731
    (call,) = calls_of(shrink, given.x, given.a_pool, *tables, items)["lora_shrink"]
    assert call.results == (f"{rows}x64xbf16",)
    assert call.operands[7] == f"{tiles}x{lora_tiles.RECORD}xi32"
    h = array(rows, 64)
    for y, aliases in ((None, {}), (added(rows)[0], {9: 0})):
        (call,) = calls_of(lora_gemm.lora_expand, y, h, given.b_pool, *tables, items)["lora_expand"]
        assert call.operands[7] == f"{tiles}x{lora_tiles.RECORD}xi32"
        assert (call.results, call.aliases) == ((f"{rows}x{D_OUT}xbf16",), aliases)
        assert call.attributes == {"accumulate": y is not None}


def test_a_shrink_of_low_ranks_is_by_items_alone(on_hopper):
    given = batch(2048, lora_tiles.ITEMS_RANK)
    shrink = lambda *arrays: lora_gemm.lora_shrink(*arrays, given.max_rank)  # noqa: E731
    tables = given.entries, given.scaling
    (call,) = calls_of(shrink, given.x, given.a_pool, *tables, items_of(2048))["lora_shrink"]
    assert call.operands[7] == f"0x{lora_tiles.RECORD}xi32"


def test_a_pair_is_a_launch_of_one_map(on_hopper):
    given = batch(20, 64)
    pair = lambda *arrays: lora_gemm.lora_pair(*arrays, 64)  # noqa: E731
    pools = given.x, given.a_pool, given.b_pool, given.entries, given.scaling
    (call,) = calls_of(pair, *added(20), *pools, items_of(20))["lora_gemm"]
    assert (call.aliases, call.attributes["sites"]) == ({8: 1}, [0])


def test_a_launch_that_cannot_be_is_refused(on_hopper):
    given = batch(20)
    module = (*added(20), given.entries, given.scaling)
    pools = given.x, given.a_pool, given.b_pool, items_of(20)
    with pytest.raises(ValueError, match="1 to 4 modules, not 5"):
        lora_gemm.lora_pairs([module] * 5, *pools, 16)
    with pytest.raises(ValueError, match="some are None"):
        lora_gemm.lora_pairs([module, (None, *module[1:])], *pools, 16)


def mapped(tokens: int, k: int, groups: int, rank: int | None, table: bool = False, slots: int = 2):
    """Return the calls of a row map with items of adapters, and the map's shapes."""
    i32 = jnp.int32
    ids, owners, num = array(tokens, k, dtype=i32), array(tokens, dtype=i32), array(dtype=i32)
    of_table = (owners, array(slots, groups - 4, dtype=i32)) if table else ()

    def run(ids, owners, num, *of_table):
        adapters = reroute.adapter_items(owners, slots, rank)
        if table:
            return reroute.reroute(ids, *of_table, num, groups, adapters)
        return reroute.row_map(ids, num, groups, adapters)

    args = (ids, owners, num, *of_table)
    return calls_of(run, *args), jax.eval_shape(run, *args)


def test_a_row_map_cuts_the_adapters_items(on_hopper):
    calls, made = mapped(64, 8, 128, 32)
    (call,) = calls["row_map"]
    assert call.operands == ("64x8xi32", "i32", "64xi32", "64xi32")
    rows = "512xi32"
    wanted = (rows, rows, "128xi32", rows, rows, "1xi32", "512x4xi32", "1xi32", "1xi32")
    assert call.results == wanted
    assert call.attributes == {"rerouted": False, "item_rows": 32}
    assert (made.items.most_runs, made.items.in_order, made.items.tiles) == (256, True, None)


def test_a_reroute_reads_the_table(on_hopper):
    calls, made = mapped(64, 8, 128, 32, table=True)
    (call,) = calls["row_map"]
    assert call.operands == ("64x8xi32", "i32", "64xi32", "2x124xi32", "64xi32", "64xi32")
    assert call.attributes["rerouted"]
    assert made.items.most_runs == 2 * 124


def test_long_runs_of_experts_are_tiles(on_hopper):
    calls, made = mapped(512, 2, 8, 64)  # 64 rows of each slot and expert in the mean
    assert made.items.tiles.tiles.shape == (2 * (1024 // 24) + 1, lora_tiles.RECORD)
    (tiles,) = calls["row_tiles"]
    assert tiles.operands == ("1024x4xi32", "1xi32", "1024xi32")
    assert mapped(512, 2, 8, 32)[1].items.tiles is None  # for which segments have a kernel


@pytest.mark.parametrize(("rank", "masked"), [(64, True), (32, False)])
def test_deltas_of_experts_rows_among_tiles_are_masked(on_hopper, rank, masked):
    """Their launch zeros rows behind the last item; others without an adapter stand before it."""
    rows, slots = 1024, 2
    rows_of = batch(rows, rank)
    entries, scaling = array(slots, 5, dtype=jnp.int32), array(slots, dtype=jnp.float32)

    def deltas(ids, owners, x, a_pool, b_pool, entries, scaling, *ys):
        adapters = reroute.adapter_items(owners, slots, rank)
        map = reroute.row_map(ids, jnp.int32(rows // 2), 8, adapters)
        modules = [(y, entries, scaling) for y in ys or (None, None)]
        experts = map.items.row_to_slot, map.row_to_expert
        return lora_gemm.lora_gemms(modules, x, a_pool, b_pool, *experts, rank, map.items)

    ids, owners = (array(*shape, dtype=jnp.int32) for shape in ((rows // 2, 2), (rows // 2,)))
    given = ids, owners, rows_of.x, rows_of.a_pool, rows_of.b_pool, entries, scaling
    mask = f"tensor<{rows}x{D_OUT}xi1>"
    for ys, wanted in (((), masked), (added(rows, 2), False)):
        lowered = jax.jit(deltas).trace(*given, *ys).lower(lowering_platforms=("cuda",))
        selects = [s for s in lowered.as_text().splitlines() if "stablehlo.select" in s]
        assert any(mask in select for select in selects) == wanted


@pytest.mark.parametrize(("tokens", "groups"), [(4096, 128), (64, 1024)])
def test_many_rows_or_groups_are_counted_in_memory(on_hopper, tokens, groups):
    calls, _ = mapped(tokens, 8, groups, 16)
    (call,) = calls["row_map"]
    rows, ctas = tokens * 8, -(-tokens * 8 // reroute.COUNT_ROWS)
    assert call.results[5] == f"{ctas * 3 * (groups // 2 + 1)}xi32"
    assert call.results[8] == f"{rows}xi32"


def test_more_rows_than_a_cta_sorts_are_mapped_as_tokens_of_one_expert(on_hopper):
    rows = lora_gemm.MAX_ROWS + 1
    run = lambda owners: reroute.adapter_items(owners, SLOTS, 16)  # noqa: E731
    owners = array(rows, dtype=jnp.int32)
    calls, made = calls_of(run, owners), jax.eval_shape(run, owners)
    assert set(calls) == {"row_map"}
    assert calls["row_map"][0].operands[0] == f"{rows}x1xi32"
    assert isinstance(made, AdapterItems)
    assert (made.order.shape, made.items.shape, made.max_rank) == ((rows,), (rows, 4), 16)


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (lambda: reroute.check_support(0, 8, 4), "1 to 262144 rows, not 0"),
        (lambda: reroute.check_support(1, 9000, 4), "8192 experts of a token, not 9000"),
        (lambda: reroute.check_support(1, 8, 16385), "1 to 16384 groups, not 16385"),
        (lambda: support(dtype=jnp.float32), "bfloat16, not float32"),
        (lambda: support(rows=8193), "1 to 8192 rows, not 8193"),
        (lambda: support(widths=(64, 100)), r"widths in steps of 64, not \[100\]"),
        (lambda: support(slots=65535), "1 to 65534 slots, not 65535"),
        (lambda: support(max_rank=0), "ranks to 128, not 0"),
    ],
)
def test_declines_what_no_kernel_serves(check, why):
    with pytest.raises(NotImplementedError, match=why):
        check()


def support(dtype=jnp.bfloat16, rows=8, widths=(), slots=8, max_rank=8) -> None:
    lora_gemm.check_support(jnp.dtype(dtype), rows, widths, slots, max_rank)
