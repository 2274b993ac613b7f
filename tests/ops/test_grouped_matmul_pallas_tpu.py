"""The TPU kernel of the grouped matmul, interpreted: the reference's result, zeros, no races."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import TOLERANCE
from tpu_interpreter import interpreted

from lora_jax.ops.cases import GroupedCase, grouped_case
from lora_jax.ops.grouped_matmul import grouped_matmul, pallas_tpu, reference

meaning = jax.jit(reference.grouped_matmul)
on_tpu = interpreted(pallas_tpu.grouped_matmul)


def arguments(case: GroupedCase) -> tuple:
    """Return the kernel's arguments; rows in no group are NaN."""
    rows = int(case.group_sizes.sum())
    return case.x.at[rows:].set(jnp.nan), case.w, case.group_sizes, case.bias


def assert_right(case: GroupedCase, got: np.ndarray):
    want = np.asarray(meaning(*arguments(case)), np.float32)
    np.testing.assert_allclose(got, want, **TOLERANCE[case.x.dtype.name])
    assert not got[int(case.group_sizes.sum()) :].any()


@pytest.mark.parametrize("popularity", ["identical", "skewed", "distinct", "zipf", "none"])
@pytest.mark.parametrize(("dtype", "bias"), [("float32", True), ("bfloat16", False)])
def test_matches_the_reference(dtype, bias, popularity):
    """60 rows in tiles of 16 for 9 groups, some of them empty; d_out is no multiple of a tile."""
    case = grouped_case(40, 9, 200, 256, popularity=popularity, dtype=dtype, bias=bias, padding=20)
    assert_right(case, on_tpu(*arguments(case)))


def test_one_group_of_one_row():
    case = grouped_case(1, 1, 3, 128, bias=True)
    assert_right(case, on_tpu(*arguments(case)))


def test_wide_matrices_are_cut_into_blocks(monkeypatch):
    """Blocks of 128 columns, the last of 72, and three of d_in."""
    case = grouped_case(40, 5, 200, 384, dtype="bfloat16", bias=True, padding=3)
    monkeypatch.setattr(pallas_tpu, "MAX_K_BLOCK", 128)
    monkeypatch.setattr(pallas_tpu, "WEIGHT_BYTES", 128 * 128 * 2)
    cut = interpreted(pallas_tpu.grouped_matmul)
    assert_right(case, cut(*arguments(case)))


def test_a_row_has_the_same_bits_wherever_it_stands():
    rng = np.random.default_rng(1)
    case = grouped_case(48, 1, 72, 256)
    want = on_tpu(*arguments(case))
    order = rng.permutation(48)
    got = on_tpu(case.x[order], *arguments(case)[1:])
    np.testing.assert_array_equal(got, want[order])
    # Alone, and as the last of five groups: other tiles, other neighbours.
    w = jnp.concatenate([jnp.zeros_like(case.w)] * 4 + [case.w])
    sizes = jnp.array([3, 0, 9, 20, 16], jnp.int32)
    moved = dataclasses.replace(case, w=w, group_sizes=sizes)
    np.testing.assert_array_equal(on_tpu(*arguments(moved))[32:], want[32:])
    one = on_tpu(case.x[order[:1]], case.w, jnp.array([1], jnp.int32), None)
    np.testing.assert_array_equal(one, want[order[:1]])


def test_declines_what_it_cannot_serve():
    case = grouped_case(4, 2, 128, 96)
    with pytest.raises(NotImplementedError, match="runs on a TPU only"):
        grouped_matmul(case.x, case.w, case.group_sizes, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="4 rows of width 96"):
        on_tpu(*arguments(case))
    with pytest.raises(NotImplementedError, match="0 rows of width 128"):
        on_tpu(jnp.zeros((0, 128)), jnp.zeros((2, 4, 128)), case.group_sizes, None)
