"""An MLP's two products with their adapters, multiplied in one launch: the CUDA kernel on a CPU."""

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
def test_gate_times_up_has_the_bits_of_three_launches(library, rows, d_out, d_in, ranks, idle, sms):
    """Rows without adapters and padding too; gate and up of an adapter differ in rank."""
    case = lora_case(rows, d_out, d_in, ranks=ranks, dtype="bfloat16")
    x, *pools = (copied(a) for a in (case.x, case.a_pool, case.b_pool))
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(2)])
    scaling = np.stack([copied(case.scaling) + m for m in range(2)])
    rng, real = np.random.default_rng(rows), rows - rows // 8
    y = rng.standard_normal((2, rows, d_out)).astype(BF16)
    owners = copied(case.row_to_slot)
    owners[:: idle or rows + 1] = -1
    owners[real:], y[:, real:] = -1, 0
    sizes = (rows, d_out, d_in, *map(len, pools), len(ranks), case.max_rank)
    tables = (
        *pools,
        entries,
        scaling,
        owners,
        np.zeros(rows, np.int32),
        np.array([real], np.int32),
    )

    def product(apart: int) -> np.ndarray:
        library.emulate(1 if apart else sms, rows)
        products, given = np.full((rows, d_out), np.nan, BF16), y.copy()
        call(library.lora_gated, products, given, x, *tables, *sizes, apart)
        assert apart or (given.view(np.uint16) == y.view(np.uint16)).all()
        return products.view(np.uint16)

    want = product(1)
    assert not want[real:].any()
    np.testing.assert_array_equal(product(0), want)
