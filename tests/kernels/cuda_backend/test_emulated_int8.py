"""CUDA kernels over rank rows in 8 bits on a CPU: right numbers, a row's bits in any company.

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

from lora_jax.ops.cases import LoraCase, lora_case
from lora_jax.rank_rows import parts, quantised

pytestmark = [
    pytest.mark.long,  # test_emulated.py has a case of the emulator
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRIVER = "int8.cc"
BF16 = ml_dtypes.bfloat16


def coded(case: LoraCase) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return both pools in 8 bits, and the values that they stand for in float64."""
    rows = [quantised(copied(pool).astype(np.float32)) for pool in (case.a_pool, case.b_pool)]
    meant = [values.astype(np.float64) * scales[..., None] for values, scales in map(parts, rows)]
    return rows, meant


def experts_of(case: LoraCase) -> np.ndarray:
    """Return each row's expert."""
    rows = len(case.row_to_slot)
    return np.zeros(rows, np.int32) if case.row_to_expert is None else copied(case.row_to_expert)


@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "modules", "experts"),
    [(1, 64, 4288, 2, 0), (37, 192, 320, 1, 3), (70, 448, 64, 2, 0)],
)
def test_rows_get_the_sums_of_the_values(library, rows, d_out, d_in, modules, experts):
    """Modules differ in where the slots' weights are, here turned by one slot."""
    ranks = (16, 8, 0, 40, 1, 13)
    case = lora_case(rows, d_out, d_in, ranks=ranks, num_experts=experts, dtype="bfloat16")
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(modules)])
    scaling = np.stack([copied(case.scaling) + m for m in range(modules)])
    owners, which, x = copied(case.row_to_slot), experts_of(case), copied(case.x)
    pools, (a_pool, b_pool) = coded(case)
    y = np.stack([copied(case.y)] * modules)
    want = y.astype(np.float64)
    sizes = (modules, rows, d_out, d_in, len(ranks), case.max_rank, 32)
    library.emulate(1, rows)
    call(library.lora_int8, y, x, *pools, entries, scaling, owners, which, *sizes)
    for m, (row, slot) in itertools.product(range(modules), enumerate(owners)):
        if slot < 0:
            continue
        a_row, b_row, rank, a_stride, b_stride = entries[m, slot]
        a, b = a_pool[a_row + which[row] * a_stride :], b_pool[b_row + which[row] * b_stride :]
        want[m, row] += (
            float(scaling[m, slot]) * (x[row].astype(np.float64) @ a[:rank].T) @ b[:rank]
        )
    np.testing.assert_allclose(y.astype(np.float64), want, **TOLERANCE["bfloat16"])
    without = owners < 0
    np.testing.assert_array_equal(
        y[:, without].view("u2"), want.astype(BF16)[:, without].view("u2")
    )


def test_a_row_has_the_same_bits_however_the_rows_are_cut(library):
    """Items of 8, 16 and 32 rows take ways of their own; CTAs share them out by their number."""
    rows, d_out, d_in, ranks = 90, 320, 2240, (16, 37, 5)
    case = lora_case(rows, d_out, d_in, ranks=ranks, dtype="bfloat16")
    owners = (np.arange(rows) // 40).astype(np.int32)
    pools, _ = coded(case)
    tables = [*pools, copied(case.entries), copied(case.scaling)]

    def added(some: np.ndarray, sms: int, item_rows: int) -> np.ndarray:
        y, x = copied(case.y)[some], copied(case.x)[some]
        sizes = (1, len(some), d_out, d_in, len(ranks), case.max_rank, item_rows)
        library.emulate(sms, item_rows)
        call(library.lora_int8, y, x, *tables, owners[some], 0 * owners[some], *sizes)
        return y.view(np.uint16)

    want = added(np.arange(rows), 1, 32)
    np.testing.assert_array_equal(added(np.arange(rows), 3, 16), want)
    some = np.random.default_rng(4).permutation(rows)[:11]
    np.testing.assert_array_equal(added(some, 2, 8), want[some])


@pytest.mark.parametrize(
    "kinds", [("float32", "float32"), ("bfloat16",) * 2, ("bfloat16", "float32")]
)
def test_row_by_row_matches_float64(library, kinds):
    dtype, y_dtype = kinds
    case = lora_case(9, 31, 33, ranks=(16, 0, 5), num_experts=3, dtype=dtype)
    y = copied(case.y).astype(np.float32 if y_dtype == "float32" else BF16)
    pools, (a_pool, b_pool) = coded(case)
    owners, which, x = copied(case.row_to_slot), experts_of(case), copied(case.x)
    want, entries, scaling = y.astype(np.float64), copied(case.entries), copied(case.scaling)
    kind = 2 if y_dtype == dtype == "bfloat16" else int(dtype == "bfloat16")
    sizes = np.array([9, 33, 31, 3, 16, kind], np.int32)
    library.emulate(1, 3)
    call(library.lora_rows, x, *pools, entries, scaling, owners, which, sizes, y)
    for row, slot in enumerate(owners):
        if slot < 0:
            continue
        a, b, rank, a_stride, b_stride = entries[slot]
        h = a_pool[a + which[row] * a_stride :][:rank] @ x[row].astype(np.float64)
        want[row] += float(scaling[slot]) * h @ b_pool[b + which[row] * b_stride :][:rank]
    np.testing.assert_allclose(y.astype(np.float64), want, **TOLERANCE[y_dtype])
