"""Launches of maps that share rows: gate and up, multiplied, and q, k and v. CUDA on a CPU."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call, copied

from lora_jax.ops.cases import lora_case

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.long,  # test_emulated.py has a case of the emulator
]
DRIVER = "gated.cc"
BF16 = ml_dtypes.bfloat16


def given(rows: int, d_out: int, d_in: int, ranks: tuple[int, ...], idle: int) -> tuple:
    """Return gate and up, and what a driver takes behind them; the last eighth is padding.

    Every `idle`-th row has no adapter. Gate and up of an adapter differ in rank. Zeros of both
    signs are among the products.
    """
    case = lora_case(rows, d_out, d_in, ranks=ranks, dtype="bfloat16")
    x, *pools = (copied(a) for a in (case.x, case.a_pool, case.b_pool))
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(2)])
    scaling = np.stack([copied(case.scaling) + m for m in range(2)])
    rng, real = np.random.default_rng(rows), rows - rows // 8
    y = rng.standard_normal((2, rows, d_out)).astype(BF16)
    y[..., ::4], y[..., 1::4] = -0.0, 0.0  # of every row, adapters of rank 0 too
    owners = copied(case.row_to_slot)
    owners[:: idle or rows + 1] = -1
    owners[real:], y[:, real:] = -1, 0
    sizes = (rows, d_out, d_in, *map(len, pools), len(ranks), case.max_rank)
    experts, num_rows = np.zeros(rows, np.int32), np.array([real], np.int32)
    return y, (x, *pools, entries, scaling, owners, experts, num_rows, *sizes)


def of_three_launches(library, y: np.ndarray, tables: tuple) -> np.ndarray:
    """Return the products' bits where sums are written and then multiplied."""
    product = np.full(y.shape[1:], np.nan, BF16)
    library.emulate(1, 1)
    call(library.lora_gated, product, y.copy(), *tables, 1)
    return product.view(np.uint16)


@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "idle", "sms"),
    [
        (1, 64, 320, (16, 9), 0, 2),
        (1, 64, 320, (16,), 1, 2),  # no row has an adapter
        (64, 192, 320, (16, 8, 0, 13), 3, 16),
        (30, 64, 9344, (16, 9), 0, 16),  # more chunks of d_in than a CTA holds
        (128, 1088, 64, (16, 40), 2, 3),  # several blocks of columns a unit, several units a CTA
        (250, 192, 320, (64, 1, 24, 16, 33), 0, 16),  # several units of the shrink a cluster
    ],
)
def test_few_rows_have_the_bits_of_three_launches(library, rows, d_out, d_in, ranks, idle, sms):
    """Rows without adapters and padding too."""
    y, tables = given(rows, d_out, d_in, ranks, idle)
    want = of_three_launches(library, y, tables)
    product, before = np.full((rows, d_out), np.nan, BF16), y.copy()
    library.emulate(sms, rows)
    call(library.lora_gated, product, y, *tables, 0)
    np.testing.assert_array_equal(product.view(np.uint16), want)
    np.testing.assert_array_equal(y.view(np.uint16), before.view(np.uint16))
    real = rows - rows // 8
    assert not want[real:].any()


@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "idle", "least_rows", "sms"),
    [
        (300, 192, 64, (16, 0, 9), 0, 24, 1),
        (300, 576, 64, (32, 8, 17, 24, 3), 4, None, 1),  # one adapter stays in items
        (260, 64, 128, (16,), 2, 1, 2),
        (260, 64, 64, (8, 13), 1, 1, 1),  # no row has an adapter
        (400, 64, 64, (8, 16), 0, 1000, 1),  # no tiles
    ],
)
def test_tiles_have_the_bits_of_three_launches(
    library, rows, d_out, d_in, ranks, idle, least_rows, sms
):
    y, tables = given(rows, d_out, d_in, ranks, idle)
    want = of_three_launches(library, y, tables)
    product, tiled = np.full((rows, d_out), np.nan, BF16), np.zeros(1, np.int32)
    of_adapter = np.bincount(tables[5][tables[5] >= 0], minlength=1)
    least = int(min(of_adapter)) + 1 if least_rows is None else least_rows
    library.emulate(sms, rows)
    call(library.lora_gated_tiles, product, y, *tables, least, tiled)
    np.testing.assert_array_equal(product.view(np.uint16), want)
    assert tiled[0] == of_adapter[of_adapter >= least].sum()
    assert least_rows is not None or 0 < tiled[0] < of_adapter.sum()


@pytest.mark.parametrize(
    ("rows", "widths", "d_in", "ranks", "sms"),
    [
        (1, (192, 64, 64), 320, (16, 9), 2),
        (64, (576, 128, 128), 64, (16, 8, 0, 13), 16),
        (128, (64, 1088), 64, (16, 40), 3),  # several units a CTA, of either
        (250, (192, 64, 64, 128), 320, (64, 1, 24), 16),
    ],
)
def test_maps_of_several_widths_have_the_bits_of_a_launch_each(
    library, rows, widths, d_in, ranks, sms
):
    case = lora_case(rows, max(widths), d_in, ranks=ranks, dtype="bfloat16")
    count, owners = len(widths), copied(case.row_to_slot)
    owners[4::5] = -1
    x, a_pool, b_pool = (copied(a) for a in (case.x, case.a_pool, case.b_pool))
    b_pools = [np.ascontiguousarray(np.roll(b_pool, m, 0)[:, :w]) for m, w in enumerate(widths)]
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(count)])
    scaling = np.stack([copied(case.scaling) + m for m in range(count)])
    pools, sizes = np.array([b.ctypes.data for b in b_pools]), np.array(widths, np.int32)
    tables = (x, a_pool, entries, scaling, owners, np.zeros(rows, np.int32), sizes)
    numbers = (count, rows, d_in, len(a_pool), len(b_pool), len(ranks), case.max_rank)

    def added(apart: int) -> list[np.ndarray]:
        library.emulate(1 if apart else sms, rows)
        ys = [np.ascontiguousarray(copied(case.y)[:, :w]) for w in widths]
        where = np.array([y.ctypes.data for y in ys])
        call(library.lora_joined, where, pools, *tables, *numbers, apart)
        return [y.view(np.uint16) for y in ys]

    for got, want, width in zip(added(0), added(1), widths, strict=True):
        np.testing.assert_array_equal(got, want)
        assert (want != copied(case.y)[:, :width].view(np.uint16)).any()
