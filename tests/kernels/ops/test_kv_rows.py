"""KV rows in 8 bits: values, scales, and attention over pages of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.ops.test_paged_attention import MIXED, SHAPES, oracle, run, tokens_of
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import AttentionCase, attention_case
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.kv_rows import CODED, coded, decoded, stored_dim
from lora_jax.ops.paged_attention import paged_attention
from lora_jax.ops.pages import write
from lora_jax.ops.place_heads import PlaceHeadsArgs, place_heads

E4M3 = ml_dtypes.float8_e4m3fn


@functools.cache
def rows(dtype: str = "float32"):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 2, 30)) * 10.0 ** rng.uniform(-12, 12, (40, 2, 1))
    return jnp.asarray(values.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_rounded_once_under_the_least_power_of_two(dtype):
    plain = np.asarray(rows(dtype), np.float32)
    made = jax.jit(coded)(rows(dtype))
    assert (made.dtype, made.shape) == (CODED, (40, 2, stored_dim(30, CODED)))
    scales = np.asarray(made)[..., 30:].copy().view(np.float32)[..., 0]
    largest = np.abs(plain).max(axis=-1)
    assert (largest / scales <= 448).all()
    assert (largest / scales > 224).all()
    want = (plain / scales[..., None]).astype(E4M3)
    np.testing.assert_array_equal(np.asarray(made)[..., :30].view(E4M3), want)
    np.testing.assert_array_equal(decoded(made), want.astype(np.float32) * scales[..., None])
    error = np.abs(np.asarray(decoded(made)) - plain)
    assert (error <= 2.0**-4 * np.abs(plain) + 2.0**-10 * scales[..., None]).all()


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ([448.0, -1.0], [448, -1]),
        ([449.0, -2.0], [448, -2]),
        ([0.0, 0.0], [0, 0]),
        ([2.0**-120, -(2.0**-121)], [2.0**-120, -(2.0**-121)]),  # the least scale is 2^-126
    ],
)
def test_rows_at_the_ends_of_the_range(row, want):
    assert np.asarray(decoded(coded(jnp.asarray(row, jnp.float32)))).tolist() == want


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(bad):
    row = jnp.asarray([[1.0, bad], [1.0, 2.0]], jnp.float32)
    got = np.asarray(decoded(coded(row)))
    assert np.isnan(got[0]).all()
    assert got[1].tolist() == [1, 2]


def in_8_bits(case: AttentionCase) -> tuple[AttentionCase, AttentionCase]:
    """Return the case over pages in 8 bits, and one over the values that they stand for."""
    pages = {"k_pages": case.k_pages, "v_pages": case.v_pages}
    made = {name: coded(p) for name, p in pages.items() if p is not None}
    meant = {name: decoded(p) for name, p in made.items()}
    return dataclasses.replace(case, **made), dataclasses.replace(case, **meant)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", ["odd", "odd-latent", "gpt-oss"])
def test_the_kernel_reads_the_rows_values(shape, dtype):
    case, meant = in_8_bits(attention_case(SHAPES[shape], MIXED, dtype=dtype, padding=3))
    np.testing.assert_allclose(run(case), oracle(meant), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("shape", ["odd", "odd-latent"])
def test_portable_jax_reads_the_rows_values(shape, implementation):
    case, meant = in_8_bits(attention_case(SHAPES[shape], MIXED, padding=3))
    got = run(case, implementation)
    np.testing.assert_allclose(got, oracle(meant), **TOLERANCE["float32"])


def test_outputs_are_near_those_of_plain_pages():
    plain = attention_case(SHAPES["gqa-128"], MIXED, dtype="bfloat16")
    case, _ = in_8_bits(plain)
    want = oracle(plain)
    error = np.sqrt(np.mean((run(case) - want) ** 2) / np.mean(want**2))
    assert 0.005 < error < 0.04


def test_a_token_has_the_same_bits_alone_and_in_any_chunk():
    case, _ = in_8_bits(attention_case(SHAPES["mha-64"], MIXED, dtype="bfloat16"))
    want = run(case)
    for token in range(int(case.num_tokens)):
        if token % 5 == 0:
            some = np.array([token])
            np.testing.assert_array_equal(run(tokens_of(case, some)), want[some])


def test_writes_code_new_rows_and_other_kernels_decline():
    pages = jnp.zeros((3, 4, 2, 46), CODED)
    slots = jnp.asarray(np.arange(40) % 13, jnp.int32).at[12:].set(12)
    new = rows()[:40]
    got = write(pages, new[:12], slots[:12]).reshape(12, 2, 46)
    np.testing.assert_array_equal(got, coded(new)[:12])
    angles = (jnp.ones((12, 15), jnp.float32), jnp.zeros((12, 15), jnp.float32))
    heads = (new[:12], new[:12], new[12:24])
    args = PlaceHeadsArgs(*heads, *angles, None, pages, pages, slots[:12])
    for implementation in ("xla", "reference"):
        _, k_pages, v_pages = place_heads(args, implementation=implementation)
        np.testing.assert_array_equal(k_pages.reshape(12, 2, 46), coded(new)[:12])
        np.testing.assert_array_equal(v_pages.reshape(12, 2, 46), coded(new)[12:24])
    with pytest.raises(Declined, match="writes pages of k's dtype, not in 8 bits"):
        place_heads(args, implementation="cuda")
    case, _ = in_8_bits(attention_case(SHAPES["tiny"], MIXED))
    for name in ("pallas_gpu", "pallas_tpu"):
        with pytest.raises(Declined, match="reads pages of q's dtype, not in 8 bits"):
            paged_attention(*case.arrays, **case.options, implementation=name)
    wrong = dataclasses.replace(case, k_pages=case.k_pages[..., :-4])
    with pytest.raises(ValueError, match="k_pages has shape"):
        paged_attention(*wrong.arrays, **wrong.options)


@pytest.mark.gpu
def test_a_gpu_reads_the_rows_values():
    case, meant = in_8_bits(attention_case(SHAPES["gqa-128"], MIXED, dtype="bfloat16", padding=3))
    np.testing.assert_allclose(run(case, None), oracle(meant), **TOLERANCE["bfloat16"])
