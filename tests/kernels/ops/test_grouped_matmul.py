"""Grouped matmul: every implementation against float64, and the same bits wherever a row stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops import dispatch
from lora_jax.ops.cases import GroupedCase, grouped_case
from lora_jax.ops.cpu import build
from lora_jax.ops.grouped_matmul import (
    gated_matmul,
    grouped_matmul,
    joined_matmul,
    matmul,
    silu_times,
)

IMPLEMENTATIONS = ["ffi", "xla", "reference"]
# rows, groups, d_out, d_in: tiles, tails and blocks of K of every kind.
SIZES = [(1, 1, 8, 16), (7, 3, 5, 12), (60, 5, 43, 172), (33, 1, 100, 24), (130, 2, 40, 2500)]
SIZES += [(3, 4, 1, 1), (64, 16, 24, 64)]


def oracle(case: GroupedCase) -> np.ndarray:
    """Return the answer in float64."""
    x, w = np.asarray(case.x, np.float64), np.asarray(case.w, np.float64)
    y = np.zeros((x.shape[0], w.shape[1]))
    row = 0
    for g, size in enumerate(np.asarray(case.group_sizes)):
        y[row : row + size] = x[row : row + size] @ w[g].T
        if case.bias is not None:
            y[row : row + size] += np.asarray(case.bias, np.float64)[g]
        row += size
    return y


jitted = functools.partial(jax.jit, static_argnames="implementation")(grouped_matmul)


def run(case: GroupedCase, implementation: str = "ffi") -> np.ndarray:
    """Return the op's result under jit, as float32 (exact for bfloat16)."""
    arrays = (case.x, case.w, case.group_sizes, case.bias)
    return np.asarray(jitted(*arrays, implementation=implementation), np.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_matches_float64(sizes, dtype):
    rows, groups, d_out, d_in = sizes
    case = grouped_case(rows, groups, d_out, d_in, dtype=dtype, bias=rows % 2 == 1, padding=3)
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(60, 5, 43, 172), (33, 1, 100, 24), (3, 4, 1, 1)], ids=str)
def test_portable_jax_matches_float64(sizes, dtype, implementation):
    rows, groups, d_out, d_in = sizes
    case = grouped_case(rows, groups, d_out, d_in, dtype=dtype, bias=rows % 2 == 1, padding=3)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("popularity", ["identical", "skewed", "distinct", "zipf", "none"])
def test_any_popularity(popularity, implementation):
    case = grouped_case(40, 9, 20, 36, popularity=popularity, bias=True, padding=2)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_in_no_group_are_exactly_zero(implementation):
    case = grouped_case(5, 3, 17, 20, bias=True, padding=30)
    x = case.x.at[5:].set(jnp.nan)
    got = grouped_matmul(x, case.w, case.group_sizes, case.bias, implementation=implementation)
    assert not np.asarray(got)[5:].any()
    assert np.isfinite(np.asarray(got)).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("d_in", [28, 768, 2500])
def test_a_row_has_the_same_bits_wherever_it_stands(d_in, dtype):
    rng = np.random.default_rng(1)
    case = grouped_case(100, 1, 43, d_in, dtype=dtype, bias=True)
    want = run(case)
    order = rng.permutation(100)
    shuffled = GroupedCase(case.x[order], case.w, case.group_sizes, case.bias)
    np.testing.assert_array_equal(run(shuffled), want[order])
    for rows in (1, 2, 5, 50):
        at = int(rng.integers(0, 100 - rows))
        part = GroupedCase(case.x[at : at + rows], case.w, jnp.array([rows], jnp.int32), case.bias)
        np.testing.assert_array_equal(run(part), want[at : at + rows])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_column_block_and_group(dtype):
    """The same matrix alone, as group 3 of 5, and column by column gives one result."""
    case = grouped_case(30, 5, 70, 900, popularity="uniform", dtype=dtype)
    want, row = run(case), 0
    for g, size in enumerate(np.asarray(case.group_sizes)):
        x = case.x[row : row + size]
        alone = GroupedCase(x, case.w[g : g + 1], jnp.array([size], jnp.int32), None)
        np.testing.assert_array_equal(run(alone), want[row : row + size])
        column = GroupedCase(x, case.w[g : g + 1, 11:12], alone.group_sizes, None)
        np.testing.assert_array_equal(run(column)[:, 0], want[row : row + size, 11])
        row += size


def test_work_on_several_threads_has_the_same_bits():
    """Large enough for threads (2 x 10^9 operations) against rows small enough for none."""
    case = grouped_case(300, 1, 2048, 1500)
    want = run(case)
    for row in (0, 123, 299):
        alone = GroupedCase(case.x[row : row + 1], case.w[:, :40], jnp.array([1], jnp.int32), None)
        np.testing.assert_array_equal(run(alone)[0], want[row, :40])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matmul_is_one_group(implementation):
    case = grouped_case(9, 1, 12, 50, bias=True, padding=4)
    assert case.bias is not None
    num_rows = jnp.int32(9)
    got = matmul(case.x, case.w[0], num_rows, case.bias[0], implementation=implementation)
    np.testing.assert_allclose(np.asarray(got), oracle(case), **TOLERANCE["float32"])


def test_several_maps_of_one_x_are_products_of_their_own():
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(5, 16)), jnp.float32)
    weights = [jnp.asarray(rng.normal(size=(width, 16)), jnp.float32) for width in (8, 24)]
    biases, count = [None, jnp.ones(24)], jnp.int32(4)
    ys = joined_matmul(x, weights, count, biases)
    for y, w, bias in zip(ys, weights, biases, strict=True):
        np.testing.assert_array_equal(y, matmul(x, w, count, bias))
    with pytest.raises(ValueError, match="2 weights, 1 biases"):
        joined_matmul(x, weights, count, biases[:1])


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_joined_map_names_a_bias_that_does_not_fit():
    x, w, count = jnp.zeros((5, 16)), jnp.zeros((8, 16)), jnp.int32(4)
    with pytest.raises(
        ValueError, match=r"joined_matmul: bias 1 has shape \(4,\), expected \(8,\)"
    ):
        joined_matmul(x, [w, w], count, [None, jnp.zeros(4)])
    with pytest.raises(ValueError, match=r"joined_matmul: dtypes .* bias 0 bfloat16"):
        joined_matmul(x, [w, w], count, [jnp.zeros(8, jnp.bfloat16), None])


@pytest.mark.parametrize("implementation", ["ffi", "xla", "reference", None])
def test_joined_maps_run_as_the_named_implementation(implementation):
    x, w, count = jnp.ones((5, 16)), jnp.ones((8, 16)), jnp.int32(4)
    with dispatch.noted() as choices:
        joined_matmul(x, [w, w], count, [None, None], implementation=implementation)
    found = {op: [one["implementation"] for one in ones] for op, ones in choices.table().items()}
    if implementation in ("ffi", None):
        assert found == {"joined_matmul": ["ffi"]}
    else:
        assert found == {"joined_matmul": ["composed"], "grouped_matmul": [implementation]}


def addend_of(case: GroupedCase, dtype, seed: int) -> jax.Array:
    """Return something to add; every other row of it is 0."""
    shape = (case.x.shape[0], case.w.shape[1])
    some = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    some[::2] = 0
    return jnp.asarray(some).astype(dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32")])
def test_an_addend_is_added_to_the_rounded_product(dtypes, implementation):
    case = grouped_case(21, 3, 17, 20, dtype=dtypes[0], bias=True, padding=4)
    addend = addend_of(case, dtypes[1], 0).at[21:].set(jnp.nan)
    product = run(case, implementation)
    arrays = (case.x, case.w, case.group_sizes, case.bias, addend)
    got = jitted(*arrays, implementation=implementation)
    want = jnp.asarray(product[:21]) + addend[:21].astype(jnp.float32)
    np.testing.assert_array_equal(got[:21], want.astype(case.x.dtype))
    np.testing.assert_array_equal(np.asarray(got, np.float32)[:21:2], product[:21:2])
    assert not np.asarray(got, np.float32)[21:].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_addends_of_no_row_may_hold_anything(implementation):
    case = grouped_case(21, 3, 17, 20, bias=True, padding=4)
    addend, product = jnp.full((25, 17), jnp.nan), run(case, implementation)
    arrays = (case.x, case.w, case.group_sizes)
    call = functools.partial(jitted, *arrays, case.bias, implementation=implementation)
    np.testing.assert_array_equal(call(addend, num_added=jnp.array([0], jnp.int32)), product)
    np.testing.assert_array_equal(
        call(addend * 0 + 1, num_added=jnp.array([2], jnp.int32)), call(addend * 0 + 1)
    )
    pair = (case.x, case.w, case.w, case.group_sizes)
    fuse = functools.partial(gated_matmul, *pair, implementation=implementation)
    none = fuse(addend, addend, num_added=jnp.array([0], jnp.int32))
    np.testing.assert_array_equal(none, fuse(jnp.zeros_like(addend), jnp.zeros_like(addend)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate_and_up_have_the_bits_of_two_products_and_an_activation(dtype, implementation):
    case = grouped_case(30, 4, 24, 36, dtype=dtype, padding=2)
    w_up, adds = case.w[:, ::-1], [addend_of(case, jnp.float32, seed) for seed in (1, 2)]
    multiply = functools.partial(jitted, implementation=implementation)
    fuse = jax.jit(functools.partial(gated_matmul, implementation=implementation))
    for addends in ([None, None], adds, [adds[0], None]):
        gate, up = (
            multiply(case.x, w, case.group_sizes, None, addend)
            for w, addend in zip((case.w, w_up), addends, strict=True)
        )
        got = fuse(case.x, case.w, w_up, case.group_sizes, *addends)
        np.testing.assert_array_equal(got, jax.jit(silu_times)(gate, up))
        wide = [np.asarray(a, np.float64) for a in (gate, up)]
        want = wide[0] / (1 + np.exp(-wide[0])) * wide[1]
        np.testing.assert_allclose(np.asarray(got, np.float32), want, **TOLERANCE[dtype])


@pytest.mark.usefixtures("shapes_unchecked")
def test_wrong_shapes_and_dtypes_of_addends_and_pairs_are_named():
    case = grouped_case(5, 3, 8, 16)
    args = (case.x, case.w, case.group_sizes)
    with pytest.raises(ValueError, match=r"addend has shape \(5, 7\), expected \(5, 8\)"):
        grouped_matmul(*args, None, jnp.zeros((5, 7)))
    with pytest.raises(ValueError, match=r"addends must all be float32, got addend bfloat16"):
        grouped_matmul(*args, None, jnp.zeros((5, 8), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"w_up has shape \(3, 6, 16\), expected \(3, 8, 16\)"):
        gated_matmul(case.x, case.w, case.w[:, :6], case.group_sizes)
    with pytest.raises(ValueError, match=r"dtypes must be equal.*w_up bfloat16"):
        gated_matmul(case.x, case.w, case.w.astype(jnp.bfloat16), case.group_sizes)
    with pytest.raises(ValueError, match=r"gated_matmul: up_addend has shape \(4, 8\)"):
        gated_matmul(*args[:1], case.w, case.w, args[2], jnp.zeros((5, 8)), jnp.zeros((4, 8)))
    with pytest.raises(ValueError, match=r"num_added has shape \(2,\), expected \(1,\)"):
        grouped_matmul(*args, None, jnp.zeros((5, 8)), num_added=jnp.zeros((2,), jnp.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_x_in_bfloat16_with_float32_matrices_gives_the_bits_of_its_float32_values(implementation):
    case = grouped_case(33, 2, 40, 24, bias=True, padding=3)
    narrow = case.x.astype(jnp.bfloat16)
    addend = jnp.ones((len(case.x), 40), jnp.float32)
    args = case.w, case.group_sizes, case.bias, addend
    got = jitted(narrow, *args, implementation=implementation)
    want = jitted(narrow.astype(jnp.float32), *args, implementation=implementation)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("shapes_unchecked")
def test_x_wider_than_its_matrices_is_refused():
    case = grouped_case(5, 3, 8, 16)
    with pytest.raises(ValueError, match=r"dtypes must be equal.*x float32, w bfloat16"):
        grouped_matmul(case.x, case.w.astype(jnp.bfloat16), case.group_sizes)
    narrow, bias = case.x.astype(jnp.bfloat16), jnp.zeros((3, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"dtypes must be equal.*bias bfloat16"):
        grouped_matmul(narrow, case.w, case.group_sizes, bias)


def test_runs_on_another_device_and_inside_a_program_with_donation():
    case = grouped_case(20, 1, 64, 64)
    want = run(case)
    device = jax.devices()[-1]
    x, w, sizes = (jax.device_put(a, device) for a in (case.x, case.w, case.group_sizes))
    step = jax.jit(lambda x, w, n: x + grouped_matmul(x, w, n), donate_argnums=0)
    got = step(x, w, sizes)
    assert x.is_deleted()
    assert got.devices() == {device}
    np.testing.assert_array_equal(np.asarray(got), want + np.asarray(case.x))


@pytest.mark.usefixtures("shapes_unchecked")
def test_refuses_sizes_that_do_not_fit():
    case = grouped_case(4, 2, 6, 8, bias=True)
    with pytest.raises(ValueError, match=r"x has shape \(4, 8\), expected \(4, 7\)"):
        grouped_matmul(case.x, case.w[:, :, :7], case.group_sizes)
    with pytest.raises(ValueError, match=r"group_sizes has shape \(1,\), expected \(2,\)"):
        grouped_matmul(case.x, case.w, case.group_sizes[:1])
    with pytest.raises(ValueError, match="x float32, w bfloat16"):
        grouped_matmul(case.x, case.w.astype(jnp.bfloat16), case.group_sizes)
    with pytest.raises(ValueError, match=r"group_sizes \(2,\) is float32, expected int32"):
        grouped_matmul(case.x, case.w, case.group_sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"num_rows \(2,\) 0"):
        matmul(case.x, case.w[0], case.group_sizes)


def test_the_kernels_are_there():
    """The tests above mean C++ when they say ffi."""
    assert build.available()
