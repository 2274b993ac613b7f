"""The TPU kernel of grouped LoRA, interpreted: the reference's result, no races, no neighbour."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from support.cases.kernel_calls import lora_kernel
from support.doubles.tpu_interpreter import RaceError, interpreted
from support.drivers.lowering import tpu_kernels
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import POPULARITIES, LoraCase, lora_case
from lora_jax.ops.lora_gemm import lora_gemm, pallas_tpu, reference

ROWS, D_OUT, D_IN = 20, 384, 640  # a block or two of 256 columns, and a part of one
meaning = jax.jit(lora_kernel(reference.lora_gemm), static_argnums=8)
on_tpu = functools.cache(
    lambda max_rank: interpreted(lora_kernel(pallas_tpu.lora_gemm), max_rank=max_rank)
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Shorten the kernel's loops; so small a product runs on one thread, in one order."""
    monkeypatch.setattr(pallas_tpu, "K_BLOCK", 256)
    monkeypatch.setattr(pallas_tpu, "COLUMN_BLOCK", 256)


def arguments(case: LoraCase) -> tuple:
    """Return the kernel's arguments; pools end in NaN, at a multiple of 8 rows (and of 7)."""
    *rest, experts = case.arrays
    y, x, a_pool, b_pool, *table = rest
    a_pool, b_pool = (
        jnp.pad(p, ((0, -p.shape[0] % 56), (0, 0)), constant_values=jnp.nan)
        for p in (a_pool, b_pool)
    )
    experts = jnp.zeros_like(case.row_to_slot) if experts is None else experts
    return y, x, a_pool, b_pool, *table, experts


def run(case: LoraCase) -> np.ndarray:
    return on_tpu(case.max_rank)(*arguments(case))


def assert_right(case: LoraCase, got: np.ndarray):
    want = np.asarray(meaning(*arguments(case), case.max_rank), np.float32)
    np.testing.assert_allclose(got, want, **TOLERANCE[case.x.dtype.name])


def rows_of(case: LoraCase, rows: np.ndarray) -> LoraCase:
    """Return the case with only these rows, in this order."""
    names = [n for n in ("y", "x", "row_to_slot", "row_to_expert") if getattr(case, n) is not None]
    return dataclasses.replace(case, **{name: getattr(case, name)[rows] for name in names})


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize(("experts", "dtype"), [(0, "bfloat16"), (3, "float32")])
def test_matches_the_reference(experts, dtype, popularity):
    case = lora_case(ROWS, D_OUT, D_IN, popularity=popularity, num_experts=experts, dtype=dtype)
    assert_right(case, run(case))


@pytest.mark.long
def test_ranks_above_the_lanes_of_a_register_and_experts_that_share_a():
    case = lora_case(9, 128, 256, ranks=(140, 3, 128), num_experts=3, shared_a=True, seed=1)
    assert_right(case, run(case))


@pytest.mark.long
def test_rows_without_an_adapter_keep_their_bits():
    case = lora_case(ROWS, D_OUT, D_IN, dtype="bfloat16")
    slots = case.row_to_slot.at[::2].set(-1)
    y = case.y.at[0].set(-0.0).at[2].set(jnp.nan)
    got = run(dataclasses.replace(case, row_to_slot=slots, y=y))[::2]
    want = np.asarray(y, np.float32)[::2]
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.long
@pytest.mark.parametrize(("experts", "dtype"), [(0, "bfloat16"), (3, "float32")])
def test_a_row_has_the_same_bits_whatever_its_neighbours(experts, dtype):
    rng = np.random.default_rng(2)
    case = lora_case(ROWS, D_OUT, D_IN, popularity="skewed", num_experts=experts, dtype=dtype)
    want = run(case)
    order = rng.permutation(ROWS)
    np.testing.assert_array_equal(run(rows_of(case, order)), want[order])
    alone = np.full(ROWS, order[0])  # among rows that have no adapter
    some = rows_of(case, alone)
    some = dataclasses.replace(some, row_to_slot=some.row_to_slot.at[1:].set(-1))
    np.testing.assert_array_equal(run(some)[0], want[order[0]])


@pytest.mark.long
def test_one_row_has_the_bits_it_has_among_others():
    case = lora_case(ROWS, D_OUT, D_IN, num_experts=3)
    row = np.flatnonzero(case.row_to_slot == 3)[:1]
    np.testing.assert_array_equal(run(rows_of(case, row)), run(case)[row])


@pytest.mark.long
def test_an_adapter_has_the_same_bits_at_any_place_of_the_pools():
    case = lora_case(ROWS, D_OUT, D_IN, popularity="skewed", dtype="bfloat16")

    def moved(a: int, b: int) -> np.ndarray:
        """The result with so many rows of NaN ahead of the pools."""
        pad = functools.partial(jnp.pad, constant_values=jnp.nan)
        there = dataclasses.replace(
            case,
            a_pool=pad(case.a_pool, ((a, 0), (0, 0))),
            b_pool=pad(case.b_pool, ((b, 0), (0, 0))),
            entries=case.entries + jnp.array([[a, b, 0, 0, 0]], jnp.int32),
        )
        return run(there)

    want = moved(0, 0)
    assert_right(case, want)
    for a, b in ((1, 0), (5, 7), (8, 3)):
        np.testing.assert_array_equal(moved(a, b), want)


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [{"OUT_BYTES": 256 * 4}, {"MAX_ROWS": 16, "MAX_TILE": 16}],
    ids=["columns", "rows"],
)
def test_wide_results_and_many_rows_are_cut_into_parts(limits, monkeypatch):
    """256 columns at a time, the last time 128; 16 rows at a time, the last time 4."""
    case = lora_case(ROWS, D_OUT, D_IN, num_experts=3)
    want = run(case)
    for name, value in limits.items():
        monkeypatch.setattr(pallas_tpu, name, value)
    cut = interpreted(lora_kernel(pallas_tpu.lora_gemm), max_rank=case.max_rank)
    np.testing.assert_array_equal(cut(*arguments(case)), want)


def test_declines_what_it_cannot_serve():
    case = lora_case(4, 128, 128, ranks=(8,))
    with pytest.raises(NotImplementedError, match="runs on a TPU only"):
        lora_gemm(*case.arrays, max_rank=8, implementation="pallas_tpu")
    y, x, a_pool, b_pool, *rest = arguments(case)
    with pytest.raises(NotImplementedError, match="pools of 11 and 56 rows"):
        on_tpu(8)(y, x, a_pool[:11], b_pool, *rest)
    with pytest.raises(NotImplementedError, match="widths 96 and 128"):
        on_tpu(8)(y, x[:, :96], a_pool[:, :96], b_pool, *rest)
    with pytest.raises(NotImplementedError, match="bytes of VMEM"):
        on_tpu(50000)(y, x, a_pool, b_pool, *rest)


def test_lowers_for_a_tpu_in_place_within_the_memory_that_it_asks_for():
    """16384 columns of y at a time, then the other 2048; pools stay in HBM."""
    rows, d_in, d_out, bf16, i32 = 64, 1024, 18432, jnp.bfloat16, jnp.int32
    shapes = [((rows, d_out), bf16), ((rows, d_in), bf16), ((64, d_in), bf16), ((64, d_out), bf16)]
    shapes += [((4, 5), i32), ((4,), jnp.float32), ((rows,), i32), ((rows,), i32)]
    call = functools.partial(lora_kernel(pallas_tpu.lora_gemm), max_rank=16, interpret=False)
    (kernel,) = tpu_kernels(call, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert kernel.name == "lora_gemm"
    assert {f"hbm 64x{width}xbf16" for width in (d_in, d_out)} <= set(kernel.operands)
    assert len(kernel.aliases) == 1
    assert "vmem 64x16384xbf16" in (*kernel.operands, *kernel.scratch)
    assert kernel.vmem_limit <= 128 << 20
    assert kernel.operations["matmul"] >= 2
    # Windows of A, and of B's part or last part, for the first item and for each next one.
    assert kernel.operations["enqueue_dma"] == 2 * kernel.operations["wait_dma2"] > 0


def test_the_interpreter_sees_a_race():
    """A DMA's target is read before the wait."""

    def kernel(x_ref, y_ref, sem):
        copy = pltpu.make_async_copy(x_ref, y_ref, sem)
        copy.start()
        y_ref[...] = y_ref[...] + 1.0
        copy.wait()

    def racing(x, interpret):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        sem = pltpu.SemaphoreType.DMA
        return pl.pallas_call(kernel, shape, scratch_shapes=[sem], interpret=interpret)(x)

    with pytest.raises(RaceError):
        interpreted(racing)(jnp.ones((8, 128)))
