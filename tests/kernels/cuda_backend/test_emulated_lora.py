"""The CUDA kernels of grouped LoRA on a CPU: right numbers, the same bits however shared out.

Threads are fibers and PTX is C++ here (emulator/), so this shows indices, barriers and ranges;
time, registers and memory order only show on a GPU.
"""

import itertools
import shutil

import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call, copied
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import (
    lora_case,
)

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.long,  # test_emulated.py has a case of the emulator
]
DRIVER = "drivers.cc"
BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in"), [(1, 64, 1408), (37, 192, 320), (70, 3008, 64), (150, 192, 64)]
)
@pytest.mark.parametrize("accumulate", [True, False])
def test_lora_matches_float64(library, rows, d_out, d_in, experts, modules, accumulate):
    """Modules differ in y and in where the slots' weights are, here turned by one slot.

    Without accumulation what y held does not matter, and every row of it is written.
    """
    case = lora_case(
        rows, d_out, d_in, ranks=(16, 8, 0, 40, 1, 13), num_experts=experts, dtype="bfloat16"
    )
    slots, max_rank = len(case.scaling), case.max_rank
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(modules)])
    scaling = np.stack([copied(case.scaling) + m for m in range(modules)])
    y = np.stack([copied(case.y)] * modules)
    owners = copied(case.row_to_slot)
    if not accumulate:
        y[:] = np.nan
    which = np.zeros(rows, np.int32) if case.row_to_expert is None else copied(case.row_to_expert)
    pools = [copied(a) for a in (case.x, case.a_pool, case.b_pool)]
    sizes = (modules, rows, d_out, d_in, len(case.a_pool), len(case.b_pool), slots, max_rank)
    library.emulate(1, rows)
    more = 8 if rows <= 128 else 32, int(accumulate), modules, 0  # as many launches before
    call(library.lora, y, *pools, entries, scaling, owners, which, *sizes, *more)
    want = np.stack([np.asarray(case.y, np.float64) * accumulate] * modules)
    x, a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.x, case.a_pool, case.b_pool))
    for m, (row, slot) in itertools.product(range(modules), enumerate(owners)):
        if slot < 0:
            continue
        a_row, b_row, rank, a_stride, b_stride = entries[m, slot]
        a, b = a_pool[a_row + which[row] * a_stride :], b_pool[b_row + which[row] * b_stride :]
        h = float(scaling[m, slot]) * (x[row] @ a[:rank].T)
        want[m, row] += h.astype(BF16).astype(np.float64) @ b[:rank]
    np.testing.assert_allclose(y.astype(np.float64), want, **TOLERANCE["bfloat16"])
    if not accumulate:
        assert not y[:, owners < 0].view(np.uint16).any()


@pytest.mark.parametrize(
    ("modules", "apart", "ranks"),
    [
        *(
            (modules, apart, (17, 8, 24, 1))
            for modules, apart in ((1, False), (2, False), (1, True))
        ),
        (1, True, (8, 3, 8, 1)),
    ],
)
def test_lora_has_the_same_bits_however_it_is_shared_out(library, modules, apart, ranks):
    """Second slices go to the other end of the grid; columns are drawn of four runs of items.

    Where the shrink is a launch of its own, its units are drawn too.
    """
    rows, d_out, d_in = 135, 8192, 64  # 128 and fewer rows have a kernel of their own
    case = lora_case(rows, d_out, d_in, ranks=ranks, num_experts=0, dtype="bfloat16")
    owners = np.maximum(np.arange(rows) % 9 - 5, 0).astype(np.int32)  # slot 0 has 90
    entries, scaling = (np.stack([copied(v)] * modules) for v in (case.entries, case.scaling))
    x, *pools = (copied(a) for a in (case.x, case.a_pool, case.b_pool))
    heights = len(case.a_pool), len(case.b_pool), len(ranks), case.max_rank

    def added(which, sms, item_rows):
        y = np.stack([copied(case.y)[which]] * modules)
        whose, experts = owners[which], np.zeros(len(which), np.int32)
        sizes = (modules, len(which), d_out, d_in, *heights, item_rows, 1, 0, int(apart))
        library.emulate(sms, item_rows)
        call(library.lora, y, x[which], *pools, entries, scaling, whose, experts, *sizes)
        return y.view(np.uint16)

    some = np.arange(0, rows, 10)
    want = np.concatenate([added(np.array([row]), 1, 8) for row in some], 1)
    for sms, item_rows in ((1, 32), (2, 16)):
        np.testing.assert_array_equal(added(np.arange(rows), sms, item_rows)[:, some], want)


@pytest.mark.parametrize(
    ("d_out", "d_in", "ranks"),
    [(192, 320, (16, 0, 40)), (64, 1408, (64,)), (192, 64, (13,)), (3008, 320, (16, 9, 0))],
)
@pytest.mark.parametrize("rows", [1, 9, 30, 128])
@pytest.mark.parametrize("apart", [False, True])
def test_few_rows_have_the_bits_that_they_have_among_many(library, rows, d_out, d_in, ranks, apart):
    case = lora_case(200, d_out, d_in, ranks=ranks, dtype="bfloat16")
    tables = [copied(a) for a in (case.a_pool, case.b_pool, case.entries, case.scaling)]
    some = np.random.default_rng(rows).permutation(200)[:rows]

    def added(which: np.ndarray, item_rows: int, apart: bool) -> np.ndarray:
        y, x, owners = (copied(v)[which] for v in (case.y, case.x, case.row_to_slot))
        sizes = (1, len(which), d_out, d_in, len(tables[0]), len(tables[1]), len(ranks))
        experts = np.zeros(len(which), np.int32)
        more = (*sizes, case.max_rank, item_rows, 1, 1, int(apart))
        call(library.lora, y, x, *tables, owners, experts, *more)
        return y

    library.emulate(2, rows)
    many = added(np.arange(200), 32, apart=False)
    library.emulate(16 if rows < 128 else 2, rows)  # 8 clusters: what fits them is shrunk at once
    few = added(some, 8, apart)
    np.testing.assert_array_equal(few.view(np.uint16), many[some].view(np.uint16))


@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "idle"),
    [
        (9, 64, 9344, (16, 9), 0),  # more chunks of d_in than a CTA holds
        (128, 192, 2752, (16,), 0),  # 16 items on 8 clusters: two units of each
        (77, 64, 12288, (24, 0, 16), 0),  # both, and some units have no rank rows
        (220, 64, 320, (16,), 2),  # more rows than where adapters are many, every second idle
        (250, 192, 320, (16, 8, 40), 0),  # the same, too many of them to be shrunk at once
        (100, 6080, 64, (9, 16), 0),  # a warp has several blocks of columns
    ],
)
@pytest.mark.parametrize("accumulate", [True, False])
def test_rows_of_few_adapters_are_shrunk_at_once(
    library, rows, d_out, d_in, ranks, idle, accumulate
):
    """They have the bits that they have among many rows, whose shrink is shared out otherwise."""
    case = lora_case(max(rows, 130), d_out, d_in, ranks=ranks, dtype="bfloat16")
    tables = [copied(a) for a in (case.a_pool, case.b_pool, case.entries, case.scaling)]
    all_owners = copied(case.row_to_slot)
    whole = len(all_owners)
    all_owners[:: idle or whole + 1] = -1
    some = np.random.default_rng(rows).permutation(whole)[:rows]

    def added(which: np.ndarray, item_rows: int) -> np.ndarray:
        y, x, owners = copied(case.y)[which], copied(case.x)[which], all_owners[which]
        sizes = (1, len(which), d_out, d_in, len(tables[0]), len(tables[1]), len(ranks))
        more = (case.max_rank, item_rows, int(accumulate), 1, 0)
        call(library.lora, y, x, *tables, owners, np.zeros(len(which), np.int32), *sizes, *more)
        return y.view(np.uint16)

    library.emulate(2, rows)
    many = added(np.arange(whole), 32)
    library.emulate(16, rows)
    np.testing.assert_array_equal(added(some, 8), many[some])


# The last: on how many SMs, of two CTAs each. Items of one CTA are up to 70, and so two batches.
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "experts", "modules", "sms"),
    [
        (70, 192, 320, (16, 8, 0, 32, 1, 13), 0, 2, 1),
        (150, 448, 128, (32, 20), 3, 1, 2),
        (20, 64, 192, (9,), 0, 1, 3),
        (90, 128, 64, (7, 8), 40, 2, 1),
    ],
)
def test_segments_in_order_have_the_bits_of_items(
    library, rows, d_out, d_in, ranks, experts, modules, sms
):
    case = lora_case(rows, d_out, d_in, ranks=ranks, num_experts=experts, dtype="bfloat16")
    slots, max_rank = len(case.scaling), case.max_rank
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(modules)])
    scaling = np.stack([copied(case.scaling) + m for m in range(modules)])
    pools = [*(copied(a) for a in (case.x, case.a_pool, case.b_pool)), entries, scaling]
    owners = copied(case.row_to_slot)
    which = np.zeros(rows, np.int32) if experts == 0 else copied(case.row_to_expert)
    order = np.lexsort((which, np.where(owners < 0, slots, owners)))
    owners, which = owners[order], which[order]
    want, got = (np.stack([copied(case.y)] * modules) for _ in range(2))
    sizes = (modules, rows, d_out, d_in, len(case.a_pool), len(case.b_pool), slots, max_rank)
    library.emulate(1, rows)
    call(library.lora, want, *pools, owners, which, *sizes, 8, 1, 0, 0)
    library.emulate(sms, rows)
    call(library.lora_segments, got, *pools, owners, which, *sizes)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize(
    ("rows", "gaps"), [(1, (1,)), (7, (0,)), (90, (0, 3, 40)), (90, (31,)), (4000, (0, 0, 0, 1, 2))]
)
def test_rows_of_no_item_become_zero_wherever_they_stand(library, rows, gaps):
    """Items of up to 3 rows, a gap before each, the gaps in turn; warps share the places."""
    rng, items, owned, begin = np.random.default_rng(rows), [], np.zeros(rows, bool), gaps[0]
    while begin < rows:
        count = min(len(items) % 3 + 1, rows - begin)
        items.append((0, 0, begin, count))
        owned[begin : begin + count] = True
        begin += count + gaps[len(items) % len(gaps)]
    order, y = rng.permutation(rows).astype(np.int32), np.full((rows, 192), np.nan, BF16)
    listed = np.array([*items, (0, 0, 0, rows)], np.int32)  # what lies behind them does not count
    library.emulate(1, rows)
    call(library.lora_ones, y, listed, np.array([len(items)], np.int32), order, *y.shape)
    want = np.where(owned, 8, 0).astype(BF16)  # ones of rank 8
    np.testing.assert_array_equal(y[order].view(np.uint16), np.tile(want, (192, 1)).T.view("u2"))


# The batch's ranks as in the case above; 8 rows make a segment that becomes tiles, unless all such
# segments together have too few, and shorter ones become some where clusters, 3 an SM, can have a
# tile each. The last: how many modules there are, whose weights are those of another slot each; is
# y added to; is the shrink a launch of its own. Of the last case, tiles are fewer than clusters,
# which have both modules'.
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "total", "sms", "modules", "adds", "apart"),
    [
        (70, 128, 64, (16, 8, 0, 40, 1, 13), 8, 1, 2, True, False),
        (70, 128, 64, (16, 8, 0, 40, 1, 13), 8, 1, 1, False, True),
        (50, 128, 64, (16, 8, 0, 40, 1, 13), 8, 2, 1, False, True),
        (300, 640, 320, (64, 33), 8, 2, 1, True, False),
        (90, 64, 192, (7, 100, 128), 8, 2, 2, False, False),
        (60, 192, 192, (128, 100, 7), 8, 2, 1, True, True),
        (40, 64, 4224, (30,), 8, 2, 1, True, False),
        (40, 64, 128, (8,), 41, 2, 1, False, False),
        (40, 64, 128, (8,), 8, 16, 2, True, False),
    ],
)
def test_tiles_have_the_bits_of_items(
    library, rows, d_out, d_in, ranks, total, sms, modules, adds, apart
):
    case = lora_case(rows, d_out, d_in, ranks=ranks, dtype="bfloat16")
    owners, slots = copied(case.row_to_slot), len(ranks)
    left = check_tiles(library, case, owners, total, sms, modules, adds, 0, apart)
    counts = np.bincount(owners[(owners >= 0) & (owners < slots)], minlength=slots)
    long = counts[counts >= 8].sum()
    fit = np.sum(-(-counts // 64)) <= 3 * sms
    tiled = ((counts >= 8) | fit) & (long >= total) & (long >= counts.sum() * 3 / 4)
    assert left == counts[~tiled].sum()


# The last: how many launches of the call came before; then tiles come behind the items.
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "sms", "modules", "launches"),
    [
        (300, 704, 320, (64, 33), 2, 1, 1),
        (110, 704, 320, (64, 33), 2, 1, 0),
        (120, 320, 64, (16, 8), 2, 2, 2),
        (150, 256, 64, (100,), 2, 1, 0),
    ],
)
def test_neighbours_in_tiles_have_the_bits_of_items(
    library, rows, d_out, d_in, ranks, sms, modules, launches
):
    """Units of y come by one copy where rows stand in order, some in the middle of them."""
    case = lora_case(rows, d_out, d_in, ranks=ranks, dtype="bfloat16")
    owners = np.sort(copied(case.row_to_slot))
    owners[100], owners[-40:] = owners[101], owners[-40:][::-1]
    owners[rows // 2 :: 61] = -1
    assert check_tiles(library, case, owners, 8, sms, modules, True, launches, False) == 0


def check_tiles(library, case, owners, total, sms, modules, adds, launches, apart) -> int:
    """Return how many rows stay in items where segments of 8 rows become tiles.

    The bits of the result must be those of items alone.
    """
    rows, d_out, d_in = len(owners), case.y.shape[1], case.x.shape[1]
    slots, max_rank = len(case.scaling), case.max_rank
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(modules)])
    scaling = np.stack([copied(case.scaling) + m for m in range(modules)])
    pools = [*(copied(a) for a in (case.x, case.a_pool, case.b_pool)), entries, scaling]
    which, left = np.zeros(rows, np.int32), np.zeros(1, np.int32)
    want, got = (np.stack([copied(case.y)] * modules) for _ in range(2))
    if not adds:
        want[:], got[:] = np.nan, np.nan
    sizes = (modules, rows, d_out, d_in, len(case.a_pool), len(case.b_pool), slots, max_rank, 8)
    library.emulate(1, rows)
    call(library.lora, want, *pools, owners, which, *sizes, adds, 0, 0)
    library.emulate(sms, rows)
    more = total, adds, launches, apart, left
    call(library.lora_tiles, got, *pools, owners, which, *sizes, *more)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    return left[0]


@pytest.mark.parametrize(
    ("long", "rank", "sms"),
    [((0,), 8, 4), ((3, 11, 29), 9, 16), ((7,), 8, 2), ((0, 1, 2, 3), 8, 4), ((0, 30), 24, 4)],
)
def test_a_shrink_alone_serves_every_slice_of_long_items(library, long, rank, sms):
    """Of items with more than 16 rows, two slices a unit, or all at once where units are drawn.

    They are drawn by all but 32 CTAs; those of rank 24 are smaller at last.
    """
    counts = np.where(np.isin(np.arange(44), long), 37, 1)
    rows, d_in, slots = int(counts.sum()), 64, len(counts)
    case = lora_case(rows, 64, d_in, ranks=(rank,) * slots, dtype="bfloat16")
    owners, which = np.repeat(np.arange(slots), counts).astype(np.int32), np.zeros(rows, np.int32)
    pools = [copied(a) for a in (case.x, case.a_pool, case.b_pool, case.entries, case.scaling)]
    sizes = (1, rows, 64, d_in, len(case.a_pool), len(case.b_pool), slots, rank)
    want, got, left = copied(case.y), copied(case.y), np.zeros(1, np.int32)
    library.emulate(1, rows)
    call(library.lora, want, *pools, owners, which, *sizes, 8, True, 0, 0)
    library.emulate(sms, rows)
    no_tiles = rows + 1
    call(library.lora_tiles, got, *pools, owners, which, *sizes, 8, no_tiles, True, 0, True, left)
    assert left[0] == rows
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
