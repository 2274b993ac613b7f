"""LoRA GEMM: every implementation against float64; no neighbour changes a bit; works in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.adapter_items import reference as reference_items
from lora_jax.ops.cases import POPULARITIES, LoraCase, lora_case
from lora_jax.ops.grouped_matmul import matmul
from lora_jax.ops.lora_gemm import delta_dtype, lora_gemm, lora_gemms

IMPLEMENTATIONS = ["ffi", "xla", "reference"]


def oracle(case: LoraCase) -> np.ndarray:
    """Return the answer in float64, row by row."""
    y = np.asarray(case.y, np.float64)
    x, a_pool, b_pool, scaling = (
        np.asarray(a, np.float64) for a in (case.x, case.a_pool, case.b_pool, case.scaling)
    )
    experts = np.zeros(len(y), int) if case.row_to_expert is None else case.row_to_expert
    for row, slot in enumerate(np.asarray(case.row_to_slot)):
        if slot < 0:
            continue
        a_row, b_row, rank, a_stride, b_stride = np.asarray(case.entries)[slot]
        e = int(experts[row])
        a = a_pool[a_row + e * a_stride :][:rank]
        b = b_pool[b_row + e * b_stride :][:rank]
        y[row] += scaling[slot] * (x[row] @ a.T) @ b
    return y


STATIC = ("max_rank", "implementation")
jitted = jax.jit(lora_gemm, static_argnames=STATIC)
jitted_maps = jax.jit(lora_gemms, static_argnames=(*STATIC, "sites"))


def run(case: LoraCase, implementation: str | None = "ffi") -> np.ndarray:
    """Return the op's result under jit, as float32 (exact for bfloat16)."""
    options = {"max_rank": case.max_rank, "implementation": implementation}
    return np.asarray(jitted(*case.arrays, **options), np.float32)


def rows_of(case: LoraCase, rows: np.ndarray) -> LoraCase:
    """Return the case with only these rows, in this order."""
    arrays = {name: getattr(case, name) for name in ("y", "x", "row_to_slot", "row_to_expert")}
    cut = {n: jnp.asarray(np.asarray(a)[rows]) for n, a in arrays.items() if a is not None}
    return dataclasses.replace(case, **cut)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(("rows", "d_out", "d_in"), [(1, 8, 16), (37, 70, 172), (64, 172, 24)])
def test_kernel_matches_float64(rows, d_out, d_in, experts, dtype):
    case = lora_case(rows, d_out, d_in, num_experts=experts, dtype=dtype)
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("experts", "dtype"), [(0, "bfloat16"), (4, "float32")])
def test_portable_jax_matches_float64(experts, dtype, implementation):
    case = lora_case(37, 70, 172, num_experts=experts, dtype=dtype)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_any_popularity_of_adapters_that_share_a(popularity, implementation):
    case = lora_case(50, 48, 40, popularity=popularity, num_experts=3, shared_a=True)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_without_y_the_sums_alone_come_back(dtype, implementation):
    case = lora_case(37, 70, 172, num_experts=3, dtype=dtype)
    nothing = dataclasses.replace(case, y=jnp.zeros_like(case.y))
    options = {"max_rank": case.max_rank, "implementation": implementation}
    got = jitted(None, *case.arrays[1:], **options)
    assert got.dtype == delta_dtype(case.y.dtype, implementation)
    rounded = np.asarray(got.astype(case.y.dtype), np.float32)
    np.testing.assert_array_equal(rounded, run(nothing, implementation))
    assert not np.asarray(got)[np.asarray(case.row_to_slot) < 0].any()


@pytest.mark.parametrize("experts", [0, 4])
def test_a_wide_sum_rounded_elsewhere_has_the_bits_of_a_narrow_one(experts):
    case = lora_case(37, 70, 172, num_experts=experts, dtype="bfloat16")
    nothing = jnp.zeros(case.y.shape, jnp.float32)
    delta = jnp.asarray(run(dataclasses.replace(case, y=nothing)))
    there = (case.y.astype(jnp.float32) + delta).astype(jnp.bfloat16).astype(jnp.float32)
    has = np.asarray(case.row_to_slot) >= 0
    np.testing.assert_array_equal(np.asarray(there)[has], run(case)[has])
    assert not np.asarray(delta)[~has].any()
    for implementation in ("xla", "reference"):
        got = run(dataclasses.replace(case, y=nothing), implementation)
        np.testing.assert_allclose(got, delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_without_an_adapter_keep_their_bits(dtype, implementation):
    case = lora_case(30, 50, 40, dtype=dtype)
    slots = case.row_to_slot.at[::2].set(-1)
    y = case.y.at[0].set(-0.0).at[2].set(jnp.nan)
    mixed = dataclasses.replace(case, row_to_slot=slots, y=y)
    got = run(mixed, implementation)[::2]
    want = np.asarray(y, np.float32)[::2]
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("d_out", "d_in"), [(768, 172), (24, 2048)])
def test_a_row_has_the_same_bits_whatever_its_neighbours(d_out, d_in, dtype):
    rng = np.random.default_rng(2)
    case = lora_case(80, d_out, d_in, popularity="skewed", num_experts=2, dtype=dtype)
    want = run(case)
    order = rng.permutation(80)
    np.testing.assert_array_equal(run(rows_of(case, order)), want[order])
    for rows in (1, 2, 13):
        some = rng.permutation(80)[:rows]
        np.testing.assert_array_equal(run(rows_of(case, some)), want[some])


def test_an_adapter_has_the_same_bits_at_any_place_of_the_pools():
    case = lora_case(20, 40, 36, popularity="identical")
    moved = dataclasses.replace(
        case,
        a_pool=jnp.concatenate([case.a_pool[:7] * jnp.nan, case.a_pool]),
        b_pool=jnp.concatenate([case.b_pool[:5] * jnp.nan, case.b_pool]),
        entries=case.entries + jnp.array([[7, 5, 0, 0, 0]], jnp.int32),
    )
    np.testing.assert_array_equal(run(moved), run(case))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_reads_no_more_rows_than_the_rank(implementation):
    """An adapter at the very end of the pools, of less than max_rank, with NaN all around it."""
    case = lora_case(6, 20, 24, ranks=(4,), popularity="identical")
    end = jnp.full((6, 24), jnp.nan).at[2:].set(case.a_pool[3:7])
    b_end = jnp.full((5, 20), jnp.nan).at[1:].set(case.b_pool[3:7])
    entries = jnp.array([[2, 1, 4, 0, 0]], jnp.int32)
    moved = dataclasses.replace(case, a_pool=end, b_pool=b_end, entries=entries, max_rank=16)
    np.testing.assert_allclose(run(moved, implementation), oracle(case), **TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_works_in_place_on_a_temporary(dtype):
    """The program holds no copy of y between the linear map and the adapters."""
    case = lora_case(64, 128, 128, dtype=dtype)

    def linear(w, n, y, *rest):
        del y
        return lora_gemm(matmul(rest[0], w, n), *rest, max_rank=64, implementation="ffi")

    w, n = jnp.ones((128, 128), case.x.dtype), jnp.int32(64)
    text = jax.jit(linear).lower(w, n, *case.arrays).compile().as_text()
    assert text.count("custom-call(") == 2
    assert " copy(" not in text
    assert f"{'bf16' if dtype == 'bfloat16' else 'f32'}[64,128]{{1,0}} copy" not in text


def test_donated_y_is_worked_on_in_place_on_any_device():
    case = lora_case(16, 64, 64)
    want = run(case)
    arrays = [jax.device_put(a, jax.devices()[2]) for a in case.arrays[:-1]]
    step = jax.jit(lambda *a: lora_gemm(*a, max_rank=64), donate_argnums=0)
    pointer = arrays[0].unsafe_buffer_pointer()
    got = step(*arrays)
    assert got.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(np.asarray(got), want)


def test_y_that_is_still_needed_is_not_changed():
    case = lora_case(16, 64, 64)
    before = np.array(case.y)
    new = jax.jit(lambda *a: (lora_gemm(*a, max_rank=64, implementation="ffi"), a[0]))
    _, kept = new(*case.arrays)
    np.testing.assert_array_equal(np.asarray(kept), before)
    np.testing.assert_array_equal(np.asarray(case.y), before)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_several_maps_have_the_bits_of_each_alone(implementation):
    case = lora_case(9, 16, 24, num_experts=2)
    owners = (case.row_to_slot, case.row_to_expert)
    maps = [(case.y + m, jnp.roll(case.entries, m, 0), case.scaling + m) for m in range(3)]
    ys, entries, scaling = zip(*maps, strict=True)
    pools, options = (case.x, case.a_pool, case.b_pool), {"implementation": implementation}
    options["max_rank"] = case.max_rank
    tables = (jnp.stack([v[m] for m in (2, 0, 1)]) for v in (entries, scaling))
    together = jitted_maps(ys, *pools, *tables, (1, 2, 0), *owners, **options)
    for (y, e, s), got in zip(maps, together, strict=True):
        alone = jitted(y, *pools, e, s, *owners, **options)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(alone))


def test_several_maps_are_all_added_to_or_none():
    case = lora_case(5, 8, 16)
    y, x, a_pool, b_pool, entries, scaling, row_to_slot, _ = case.arrays
    given = (x, a_pool, b_pool, entries[None], scaling[None], (0, 0), row_to_slot)
    with pytest.raises(ValueError, match="adds to all or to none"):
        lora_gemms([y, None], *given, max_rank=case.max_rank)
    sums = lora_gemms([None] * 2, *given, max_rank=case.max_rank)
    np.testing.assert_array_equal(sums[0], run(dataclasses.replace(case, y=jnp.zeros_like(y))))
    np.testing.assert_array_equal(sums[1], sums[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_deltas_added_later_have_the_bits_of_those_added_at_once(dtype, implementation):
    case = lora_case(19, 16, 24, num_experts=2, dtype=dtype)
    y, *pools, entries, scaling, row_to_slot, row_to_expert = case.arrays
    assert row_to_expert is not None
    options = {"max_rank": case.max_rank, "implementation": implementation}
    owners = (row_to_slot, row_to_expert)
    tables = jnp.stack([entries] * 2), jnp.stack([scaling, -scaling]), (0, 1)
    wide, turned = jitted_maps([None] * 2, *pools, *tables, *owners, **options)
    assert wide.dtype == delta_dtype(y.dtype, implementation) == jnp.float32
    at_once = jitted(y.astype(jnp.float32), *pools, entries, scaling, *owners, **options)
    later = (y.astype(jnp.float32) + wide).astype(y.dtype)
    np.testing.assert_array_equal(turned, -wide)
    np.testing.assert_array_equal(later, at_once.astype(y.dtype))
    np.testing.assert_array_equal(np.asarray(wide)[np.asarray(row_to_slot) < 0], 0)


def test_maps_of_several_sites_have_the_bits_of_calls_of_their_own():
    case = lora_case(19, 16, 24, dtype="bfloat16")
    y, *pools, entries, scaling, row_to_slot, row_to_expert = case.arrays
    shorter = entries.at[:, 2].set(jnp.maximum(entries[:, 2] - 1, 0))
    tables = jnp.stack([entries, shorter]), jnp.stack([scaling, 2 * scaling])
    given, options = (row_to_slot, row_to_expert), {"max_rank": case.max_rank}
    sites, ys = (1, 0, 1), (y, y + 1, -y)
    together = jitted_maps(ys, *pools, *tables, sites, *given, **options)
    for site, before, got in zip(sites, ys, together, strict=True):
        want = jitted(before, *pools, tables[0][site], tables[1][site], *given, **options)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    assert (np.asarray(together[0]) != np.asarray(y)).any()


@pytest.mark.parametrize("sites", [(0,), (0, 1)])
def test_several_maps_need_a_site_each(sites):
    case = lora_case(2, 8, 8)
    ys, pools = (case.y, case.y), (case.x, case.a_pool, case.b_pool)
    tables = (case.entries[None], case.scaling[None])
    with pytest.raises(ValueError, match=r"2 y, sites \(0.* of a table of 1"):
        lora_gemms(ys, *pools, *tables, sites, case.row_to_slot, max_rank=case.max_rank)


def test_a_slot_that_points_outside_the_pools_is_an_error():
    case = lora_case(4, 8, 8, ranks=(4,), popularity="identical")
    wrong = dataclasses.replace(case, entries=jnp.array([[5, 3, 4, 0, 0]], jnp.int32))
    with pytest.raises(Exception, match="outside the pools"):
        run(wrong)


@pytest.mark.usefixtures("shapes_unchecked")
def test_refuses_sizes_that_do_not_fit():
    case = lora_case(4, 8, 12)
    y, x, a, b, *rest = case.arrays
    with pytest.raises(ValueError, match=r"a_pool has shape \(.*, 8\), expected \(.*, 12\)"):
        lora_gemm(y, x, b, b, *rest, max_rank=64)
    with pytest.raises(ValueError, match="max_rank 0"):
        lora_gemm(y, x, a, b, *rest, max_rank=0)
    with pytest.raises(ValueError, match=r"lora_gemm: x \(1, 4, 12\) must be rank 2"):
        lora_gemm(y, x[None], a, b, *rest, max_rank=64)
    items = reference_items(rest[2][:3], 5)
    with pytest.raises(ValueError, match=r"items has shape \(3,\), expected \(4,\)"):
        lora_gemm(y, x, a, b, *rest, max_rank=64, items=items)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("entries", "int16", r"entries \(5, 5\) is int16, expected int32"),
        ("scaling", "bfloat16", r"scaling \(5,\) is bfloat16, expected float32"),
        ("row_to_slot", "uint32", r"row_to_slot \(4,\) is uint32, expected int32"),
        ("row_to_expert", "float32", r"row_to_expert \(4,\) is float32, expected int32"),
        ("a_pool", "bfloat16", "x float32, a_pool bfloat16"),
    ],
)
def test_refuses_other_dtypes(name, dtype, said):
    case = lora_case(4, 8, 12, num_experts=2)
    wrong = dataclasses.replace(case, **{name: getattr(case, name).astype(dtype)})
    with pytest.raises(ValueError, match=said):
        lora_gemm(*wrong.arrays, max_rank=64)
