"""LoRA GEMM on Hopper: against float64, same bits in any company. Anywhere: what it declines."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from support.cases.kernel_calls import lora_kernel
from support.oracles.tolerance import TOLERANCE

from cuda_backend import lora_gemm as cuda
from lora_jax.ops.cases import POPULARITIES, LoraCase, lora_case
from lora_jax.ops.lora_gemm import lora_gemm, reference


@lora_kernel
def cuda_lora(y, batch):
    """The kernel of one linear map."""
    return cuda.lora_gemm((y,), batch)[0]


# x and y wider than one stage, narrower than one box, and a last box that is half outside.
SHAPES = [(1, 64, 128), (37, 4096, 192), (300, 192, 4096), (64, 1408, 2048)]


def some_case(rows: int, d_out: int, d_in: int, **options) -> LoraCase:
    """Return a bfloat16 case; ranks are mixed, odd ones and none among them."""
    options = {"ranks": (16, 8, 0, 64, 1, 24, 13), "dtype": "bfloat16", **options}
    case = lora_case(rows, d_out, d_in, **options)
    if case.row_to_expert is None:
        return dataclasses.replace(case, row_to_expert=jnp.zeros(rows, jnp.int32))
    return case


@functools.partial(jax.jit, static_argnames="max_rank")
def kernel(*arrays, max_rank: int):
    return cuda_lora(*arrays, max_rank)


def run(case: LoraCase) -> np.ndarray:
    """Return the kernel's result as float32, which is exact."""
    return np.asarray(kernel(*case.arrays, max_rank=case.max_rank).astype(jnp.float32))


def oracle(case: LoraCase, round_h: bool = False) -> np.ndarray:
    """Return the answer in float64, row by row; `round_h` rounds what the rank sees to bfloat16."""
    y = np.asarray(case.y, np.float64)
    x, a_pool, b_pool, scaling = (
        np.asarray(a, np.float64) for a in (case.x, case.a_pool, case.b_pool, case.scaling)
    )
    for row, slot in enumerate(np.asarray(case.row_to_slot)):
        if slot < 0:
            continue
        a_row, b_row, rank, a_stride, b_stride = np.asarray(case.entries)[slot]
        e = int(case.row_to_expert[row])
        a, b = a_pool[a_row + e * a_stride :][:rank], b_pool[b_row + e * b_stride :][:rank]
        h = scaling[slot] * (x[row] @ a.T)
        y[row] += (h.astype(ml_dtypes.bfloat16).astype(np.float64) if round_h else h) @ b
    return y


def check(case: LoraCase) -> None:
    """Hold every element to the rounding that the kernel owns up to, and the whole to float64."""
    got, exact = run(case), oracle(case)
    np.testing.assert_allclose(got, oracle(case, round_h=True), **TOLERANCE["bfloat16"])
    assert np.linalg.norm(got - exact) <= 4e-3 * np.linalg.norm(exact)


def rows_of(case: LoraCase, rows: np.ndarray) -> LoraCase:
    """Return the case with only these rows, in this order."""
    names = ("y", "x", "row_to_slot", "row_to_expert")
    return dataclasses.replace(case, **{n: getattr(case, n)[rows] for n in names})


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(("rows", "d_out", "d_in"), SHAPES)
def test_matches_float64_and_the_reference(rows, d_out, d_in, experts):
    case = some_case(rows, d_out, d_in, num_experts=experts)
    check(case)
    want = lora_kernel(reference.lora_gemm)(*case.arrays, case.max_rank).astype(jnp.float32)
    np.testing.assert_allclose(run(case), np.asarray(want), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 32, 96, 128])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_any_popularity_and_rank(popularity, rank):
    case = some_case(700, 512, 1024, ranks=(rank,) * 40, popularity=popularity)
    check(case)


@pytest.mark.gpu
def test_the_most_rows_and_many_slots():
    case = some_case(cuda.MAX_ROWS, 128, 128, ranks=(8,) * 4000, popularity="zipf")
    check(case)


@pytest.mark.gpu
def test_rows_without_an_adapter_keep_their_bits():
    case = some_case(90, 512, 256)
    slots = case.row_to_slot.at[::2].set(-1).at[1].set(len(case.scaling))
    y = case.y.at[0].set(-0.0).at[1].set(jnp.nan)
    mixed = dataclasses.replace(case, row_to_slot=slots, y=y)
    kept = np.r_[0:90:2, 1]
    want = np.asarray(y.astype(jnp.float32))[kept]
    np.testing.assert_array_equal(run(mixed)[kept].view(np.int32), want.view(np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize(("d_out", "d_in"), [(4096, 192), (192, 4096)])
def test_a_row_has_the_same_bits_whatever_its_neighbours(d_out, d_in):
    rng = np.random.default_rng(2)
    case = some_case(600, d_out, d_in, popularity="skewed", num_experts=2)
    want = run(case)
    np.testing.assert_array_equal(run(case), want)
    order = rng.permutation(600)
    np.testing.assert_array_equal(run(rows_of(case, order)), want[order])
    for rows in (1, 2, 13, 64, 250):
        some = rng.permutation(600)[:rows]
        np.testing.assert_array_equal(run(rows_of(case, some)), want[some])


@pytest.mark.gpu
@pytest.mark.parametrize(("d_out", "d_in"), [(4096, 14336), (14336, 512), (1024, 4096)])
@pytest.mark.parametrize("ranks", [(16, 8, 0, 13), (64, 24)])
def test_few_rows_of_few_adapters_have_the_bits_of_many(d_out, d_in, ranks):
    """Long inputs, wide outputs, and more items than clusters: see decode_shrink.cuh."""
    rng = np.random.default_rng(3)
    case = some_case(600, d_out, d_in, ranks=ranks, popularity="skewed")
    want = run(case)
    for rows in (1, 9, 64, 128, 200, 256):
        some = rng.permutation(600)[:rows]
        np.testing.assert_array_equal(run(rows_of(case, some)), want[some])


@pytest.mark.gpu
def test_foreign_rows_of_the_pools_do_not_matter():
    case = some_case(50, 256, 320, ranks=(13,), popularity="identical")
    a_pool, b_pool = (
        jnp.full((40, pool.shape[1]), jnp.nan, pool.dtype).at[5:18].set(pool[3:16])
        for pool in (case.a_pool, case.b_pool)
    )
    entries = case.entries.at[0, :2].set(5)
    moved = dataclasses.replace(case, a_pool=a_pool, b_pool=b_pool, entries=entries)
    np.testing.assert_array_equal(run(moved), run(case))


@pytest.mark.gpu
def test_shrink_then_expand_is_the_pair():
    case = some_case(200, 1024, 2048)
    slots = len(case.scaling)

    @jax.jit
    def both(y, x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert):
        items = cuda.row_items(row_to_slot, row_to_expert, slots)
        h = cuda.lora_shrink(x, a_pool, entries, scaling, items, case.max_rank)
        return cuda.lora_expand(y, h, b_pool, entries, scaling, items).astype(jnp.float32)

    np.testing.assert_array_equal(np.asarray(both(*case.arrays)), run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 90, 2100])
def test_without_y_the_sums_alone_come_back(rows):
    """Rows of nobody lie between those of others, and an adapter of rank 0 adds nothing."""
    case = some_case(rows, 1024, 320, ranks=(16, 0, 8), popularity="uniform")
    slots = case.row_to_slot.at[::3].set(-1)
    case = dataclasses.replace(case, row_to_slot=slots, y=jnp.zeros_like(case.y))
    alone = kernel(None, *case.arrays[1:], max_rank=case.max_rank)
    got = np.asarray(alone.astype(jnp.float32))
    np.testing.assert_array_equal(got, run(case))
    np.testing.assert_array_equal(got[np.isin(slots, (-1, 1))], 0)

    @jax.jit
    def expand(x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert):
        items = cuda.row_items(row_to_slot, row_to_expert, len(scaling))
        h = cuda.lora_shrink(x, a_pool, entries, scaling, items, case.max_rank)
        return cuda.lora_expand(None, h, b_pool, entries, scaling, items).astype(jnp.float32)

    np.testing.assert_array_equal(np.asarray(expand(*case.arrays[1:])), got)


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
# By items alone, which 20 slots are too many for tiles of; by items and tiles.
@pytest.mark.parametrize(("rows", "adapters"), [(1100, 20), (1100, 3), (300, 3)])
def test_launches_with_nothing_to_do_leave_their_state_to_the_others(rows, adapters, alone):
    case = some_case(rows, 1024, 320, ranks=(16,) * adapters)
    idle = dataclasses.replace(case, row_to_slot=jnp.full((rows,), -1, jnp.int32))
    y = case.arrays[0]

    def bits(case: LoraCase) -> np.ndarray:
        given = None if alone else y
        return np.asarray(kernel(given, *case.arrays[1:], max_rank=16).view(jnp.int16))

    want = bits(case)
    unchanged = np.asarray((jnp.zeros_like(y) if alone else y).view(jnp.int16))
    for turn in (idle, case, idle, idle, case, case, idle, case):
        np.testing.assert_array_equal(bits(turn), want if turn is case else unchanged)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 200])
def test_several_modules_in_one_launch_have_the_bits_of_each_alone(rows):
    case = some_case(rows, 1024, 2048, num_experts=2)
    y, x, a_pool, b_pool, entries, scaling, *owners = case.arrays
    turned = [(y + m, jnp.roll(entries, m, 0), scaling + m) for m in range(cuda.MAX_MODULES)]

    @jax.jit
    def together(modules):
        items = cuda.row_items(*owners, len(scaling))
        return cuda.lora_pairs(modules, x, a_pool, b_pool, items, case.max_rank)

    for (y, entries, scaling), got in zip(turned, together(turned), strict=True):
        alone = kernel(y, x, a_pool, b_pool, entries, scaling, *owners, max_rank=case.max_rank)
        np.testing.assert_array_equal(np.asarray(got.view(jnp.int16)), alone.view(jnp.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [60, 300])
def test_programs_run_again_and_again_and_in_turn_give_the_same_bits(rows):
    """What a call's launches leave to each other is its own; a loop's turns are launches too."""
    case = some_case(rows, 1024, 2048)
    turned = dataclasses.replace(case, x=-case.x[::-1], row_to_slot=case.row_to_slot[::-1])
    y, *others = case.arrays

    @functools.partial(jax.jit, static_argnames="turns")
    def looped(y, *arrays, turns):
        once = functools.partial(cuda_lora, max_rank=case.max_rank)
        return jax.lax.fori_loop(0, turns, lambda _, y: once(once(y, *arrays), *arrays), y)

    want = [run(case), run(turned)]
    for _ in range(5):
        np.testing.assert_array_equal(run(turned), want[1])
        step = functools.partial(kernel, max_rank=case.max_rank)
        stepped = functools.reduce(lambda y, _: step(y, *others), range(6), y)
        around = looped(y, *others, turns=3)
        np.testing.assert_array_equal(around.view(jnp.int16), stepped.view(jnp.int16))
        np.testing.assert_array_equal(run(case), want[0])


@pytest.fixture
def kept_programs(tmp_path):
    """A folder in which programs are kept; jax's settings as they were afterwards."""
    mine = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in mine}

    def set_all(settings):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.clear_caches()

    set_all(mine)
    yield tmp_path
    set_all(before)


@pytest.mark.gpu
def test_a_program_read_from_disk_keeps_its_own_state(kept_programs):
    case = some_case(200, 1024, 256)
    want = run(case)
    files = set(kept_programs.glob("*-cache"))
    assert files
    jax.clear_caches()
    for _ in range(3):
        np.testing.assert_array_equal(run(case), want)
    assert set(kept_programs.glob("*-cache")) == files  # nothing was compiled again


@pytest.mark.gpu
def test_dispatch_reaches_the_kernel(tmp_path, monkeypatch):
    info = tmp_path / "lora_jax_cuda-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lora-jax-cuda\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[lora_jax.backends]\ncuda = cuda_backend:kernels\n")
    monkeypatch.syspath_prepend(tmp_path)
    case = some_case(20, 256, 128)
    got = jax.jit(lora_gemm, static_argnames="max_rank")(*case.arrays, max_rank=case.max_rank)
    np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), run(case))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": jnp.float32}, "bfloat16, not float32"),
        ({"rows": 9000}, "8192 rows, not 9000"),
        ({"rows": 0}, "1 to 8192 rows, not 0"),
        ({"widths": (4096, 100)}, r"steps of 64, not \[100\]"),
        ({"max_rank": 129}, "ranks to 128, not 129"),
        ({"slots": 70000}, "slots, not 70000"),
    ],
)
def test_declines_what_it_cannot_serve(change, why):
    fine = {"dtype": jnp.bfloat16, "rows": 7, "widths": (64, 128), "slots": 3, "max_rank": 16}
    fine["dtype"] = jnp.dtype(fine["dtype"])
    cuda.check_support(**fine)
    with pytest.raises(NotImplementedError, match=why):
        cuda.check_support(
            **{**fine, **change, "dtype": jnp.dtype(change.get("dtype", "bfloat16"))}
        )


@pytest.mark.parametrize("max_rank", [8, 64, 128])
def test_few_rows_come_in_items_that_their_kernel_holds(max_rank):
    plan = (Path(cuda.__file__).parent / "csrc" / "lora_gemm" / "decode_plan.cuh").read_text()
    limits = dict(re.findall(r"constexpr int (\w+) = (\d+);", plan))
    of_item = int(limits["kFewItemRows"])
    for rows, slots in (("kFewRowsOfMany", None), ("kFewRows", cuda.FEW_SLOTS)):
        held = range(1, int(limits[rows]) + 1)
        assert all(cuda.rows_per_item(n, max_rank, num_slots=slots) <= of_item for n in held)


def test_declines_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        cuda_lora(*some_case(4, 64, 64).arrays, 64)


def test_nothing_of_the_product_loads_it_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    called = []
    monkeypatch.setattr(cuda, "lora_gemm", lambda *a: called.append(a))
    case = some_case(4, 64, 64)
    lora_gemm(*case.arrays, max_rank=case.max_rank)
    assert not called
