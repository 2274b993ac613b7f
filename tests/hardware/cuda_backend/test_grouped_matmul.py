"""Float32 linear maps on Hopper: against float64, the same bits in any company, what declines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cuda_backend import grouped_matmul as cuda

kernel = jax.jit(cuda.grouped_matmul)


def make(rows, sizes, d_out, d_in, bias=False):
    rng = np.random.default_rng(rows)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    groups = len(sizes)
    x, w = normal(rows, d_in), normal(groups, d_out, d_in) * d_in**-0.5
    return x, w, jnp.asarray(sizes, jnp.int32), normal(groups, d_out) if bias else None


def oracle(x, w, sizes, bias):
    """Return the answer in float64."""
    y, start = np.zeros((x.shape[0], w.shape[1])), 0
    for g, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        y[rows] = np.asarray(x[rows], np.float64) @ np.asarray(w[g], np.float64).T
        y[rows] += 0 if bias is None else np.asarray(bias[g], np.float64)
        start += size
    return y


CASES = {
    "router": (64, (64,), 128, 2048, False),
    "sum of a row": (33, (30,), 1, 2048, False),
    "experts": (301, (0, 7, 1, 100, 0, 150), 96, 128, True),
    "one row": (1, (0,) * 40 + (1,), 5, 4, True),
    "nothing": (9, (0, 0), 17, 64, False),
    "prefill": (4096, (4090,), 64, 2048, False),
    "prefill of few experts": (4096, (4000,), 8, 4096, False),
    "tiles of several groups": (2048, (700, 0, 31, 1300), 130, 6180, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_float64(case):
    args = make(*case)
    np.testing.assert_allclose(kernel(*args), oracle(*args), rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_company():
    x, w, sizes, _ = make(512, (200, 0, 312), 128, 2048)
    whole = np.asarray(kernel(x, w, sizes, None))
    for row, group in ((0, 0), (199, 0), (201, 2), (511, 2)):
        alone = kernel(x[row : row + 1], w[group : group + 1], jnp.array([1], jnp.int32), None)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[row])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [512, 1024, 2048, 4096])  # few rows end, and tiles of 16 to 64
def test_rows_of_prompts_have_the_bits_that_they_have_in_decoding(rows):
    x, w, _, bias = make(rows, (rows,), 128, 2048, bias=True)
    whole = np.asarray(kernel(x, w, jnp.array([rows], jnp.int32), bias))
    for first in (0, 192, rows - 64):
        part = kernel(x[first : first + 64], w, jnp.array([64], jnp.int32), bias)
        np.testing.assert_array_equal(part, whole[first : first + 64])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if len(case[1]) > 1])
def test_x_in_bfloat16_gives_the_bits_of_its_float32_values(name):
    x, *rest = make(*CASES[name])
    narrow = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(kernel(narrow, *rest), kernel(narrow.astype(jnp.float32), *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # whose numbers the weights are
@pytest.mark.parametrize(
    ("rows", "live", "d_out", "d_in", "bias"),
    [(1, 1, 128, 2048, False), (8, 7, 8, 4096, True), (100, 90, 60, 2880, True)]
    + [(rows, rows - 3, 128, 2048, False) for rows in (256, 512, 2048, 8192)],
)
def test_a_router_of_bfloat16_rows_is_exact_up_to_its_sums(rows, live, d_out, d_in, bias, dtype):
    """Tensor cores multiply; every tile gives the bits that a row has alone."""
    x, w, sizes, added = make(rows, (live,), d_out, d_in, bias=bias)
    x, w = x.astype(jnp.bfloat16), w.astype(dtype).astype(jnp.float32)
    whole = np.asarray(kernel(x, w, sizes, added))
    np.testing.assert_allclose(whole, oracle(x, w, sizes, added), rtol=1e-5, atol=5e-6)
    for first in {0, live // 2, live - 1}:
        alone = kernel(x[first : first + 1], w, jnp.array([1], jnp.int32), added)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[first])


@pytest.mark.parametrize(
    ("dtype", "d_in", "why"),
    [("bfloat16", 64, "takes float32, not bfloat16"), ("float32", 66, "steps of 4, not 66")],
)
def test_declines_what_it_cannot_serve(dtype, d_in, why):
    with pytest.raises(NotImplementedError, match=why):
        cuda.check_support(jnp.dtype(dtype), 3, 8, d_in)
    with pytest.raises(NotImplementedError, match="not 0 rows by 8"):
        cuda.check_support(jnp.dtype("float32"), 0, 8, 64)
