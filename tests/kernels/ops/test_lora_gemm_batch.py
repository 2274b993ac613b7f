"""Rank rows in 8 bits: each implementation against float64 of the rows' values, and their bits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.ops.test_lora_gemm import oracle, rows_of, run
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import LoraCase, lora_case
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.lora_gemm import lora_gemm
from lora_jax.rank_rows import joined, parts, quantised

POOLS = ("a_pool", "b_pool")


def in_8_bits(case: LoraCase) -> tuple[LoraCase, LoraCase]:
    """Return the case with rows in 8 bits, and one with the values that they stand for."""
    rows = {name: quantised(np.asarray(getattr(case, name))) for name in POOLS}
    meant = {}
    for name, pool in rows.items():
        values, scales = parts(pool)
        meant[name] = jnp.asarray(values * scales[..., None])
    coded = dataclasses.replace(case, **{name: jnp.asarray(pool) for name, pool in rows.items()})
    return coded, dataclasses.replace(case, **meant)


@pytest.mark.parametrize("implementation", ["ffi", "xla", "reference"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_values_are_those_of_the_rows(dtype, implementation):
    case, meant = in_8_bits(lora_case(37, 70, 172, num_experts=3, dtype=dtype))
    np.testing.assert_allclose(run(case, implementation), oracle(meant), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_whatever_its_neighbours(dtype):
    case, _ = in_8_bits(lora_case(60, 24, 300, popularity="skewed", num_experts=2, dtype=dtype))
    want = run(case)
    for rows in (1, 2, 13):
        some = np.random.default_rng(rows).permutation(60)[:rows]
        np.testing.assert_array_equal(run(rows_of(case, some)), want[some])


def test_rows_of_whole_numbers_have_the_bits_of_bfloat16():
    case = lora_case(20, 40, 100, dtype="bfloat16")
    rng = np.random.default_rng(3)
    whole = {n: rng.integers(-127, 128, getattr(case, n).shape).astype(np.int8) for n in POOLS}
    plain = {n: jnp.asarray(v, jnp.bfloat16) for n, v in whole.items()}
    coded = {n: jnp.asarray(joined(v, np.ones(len(v), np.float32))) for n, v in whole.items()}
    want = run(dataclasses.replace(case, **plain))
    np.testing.assert_array_equal(run(dataclasses.replace(case, **coded)), want)


def test_other_kernels_decline_and_mixed_pools_are_refused():
    case, _ = in_8_bits(lora_case(4, 128, 128, dtype="bfloat16"))
    options = {"max_rank": case.max_rank}
    for name in ("pallas_gpu", "pallas_tpu"):
        with pytest.raises(Declined, match="takes rank rows of x's dtype, not in 8 bits"):
            lora_gemm(*case.arrays, **options, implementation=name)
    mixed = dataclasses.replace(case, b_pool=case.b_pool[:, :-16].astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"b_pool .* is bfloat16, expected int8"):
        lora_gemm(*mixed.arrays, **options)
    narrow = dataclasses.replace(case, a_pool=case.a_pool[:, :-4])
    with pytest.raises(ValueError, match="a_pool has shape"):
        lora_gemm(*narrow.arrays, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 64, 700])
@pytest.mark.parametrize("d_in", [128, 4096])
def test_a_gpu_reads_the_rows_values_and_keeps_a_rows_bits(rows, d_in):
    options = {"ranks": (16, 8, 0, 64, 1, 24, 13), "num_experts": 3, "dtype": "bfloat16"}
    case, meant = in_8_bits(lora_case(rows, 320, d_in, **options))
    got = run(case, "cuda")
    np.testing.assert_allclose(got, oracle(meant), **TOLERANCE["bfloat16"])
    some = np.random.default_rng(rows).permutation(rows)[:5]
    np.testing.assert_array_equal(run(rows_of(case, some), "cuda"), got[some])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gpu_takes_rows_of_any_width_one_by_one(dtype):
    case, meant = in_8_bits(lora_case(37, 70, 33, num_experts=3, dtype=dtype))
    np.testing.assert_allclose(run(case, "cuda"), oracle(meant), **TOLERANCE[dtype])
