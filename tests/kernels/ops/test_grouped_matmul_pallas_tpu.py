"""The TPU kernels of the grouped matmul, interpreted: the reference's result, zeros, no races."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doubles.tpu_interpreter import interpreted
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import GroupedCase, grouped_case
from lora_jax.ops.grouped_matmul import (
    composed,
    gated_matmul,
    grouped_matmul,
    pallas_tpu,
    plus,
    reference,
    silu_times,
)

meaning = jax.jit(reference.grouped_matmul)
meaning_of_two = jax.jit(functools.partial(composed.gated_matmul, reference.grouped_matmul))
on_tpu = interpreted(pallas_tpu.grouped_matmul)
gated_on_tpu = interpreted(pallas_tpu.gated_matmul)


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


@pytest.mark.long
def test_one_group_of_one_row():
    case = grouped_case(1, 1, 3, 128, bias=True)
    assert_right(case, on_tpu(*arguments(case)))


@pytest.mark.long
def test_wide_matrices_are_cut_into_blocks(monkeypatch):
    """Blocks of 128 columns, the last of 72, and three of d_in."""
    case = grouped_case(40, 5, 200, 384, dtype="bfloat16", bias=True, padding=3)
    monkeypatch.setattr(pallas_tpu, "MAX_K_BLOCK", 128)
    monkeypatch.setattr(pallas_tpu, "WEIGHT_BYTES", 128 * 128 * 2)
    cut = interpreted(pallas_tpu.grouped_matmul)
    assert_right(case, cut(*arguments(case)))


def addends(case: GroupedCase, count: int, dtype: str = "float32") -> list[jax.Array]:
    """Return what to add: 0 in every third row, NaN in rows that are in no group."""
    rng, rows = np.random.default_rng(2), int(case.group_sizes.sum())
    some = rng.standard_normal((count, case.x.shape[0], case.w.shape[1]), np.float32)
    some[:, ::3], some[:, rows:] = 0, np.nan
    return [jnp.asarray(a.astype(jnp.dtype(dtype))) for a in some]


def pair(case: GroupedCase) -> tuple:
    """Return the arguments of a gated product of the case's matrices and others."""
    x, w, group_sizes, _ = arguments(case)
    return x, w, w[:, ::-1], group_sizes


@pytest.mark.long
def test_an_addend_is_added_to_the_rounded_product():
    case = grouped_case(40, 9, 200, 256, popularity="skewed", dtype="bfloat16", padding=20)
    (addend,) = addends(case, 1, "bfloat16")
    plain = on_tpu(*arguments(case))
    got = on_tpu(*arguments(case), addend)
    want = plain + np.asarray(addend, np.float32)
    np.testing.assert_array_equal(got[:40], want.astype(jnp.bfloat16)[:40])
    np.testing.assert_array_equal(got[:40:3], plain[:40:3])
    assert not got[40:].any()


@jax.jit
def activated(gate: jax.Array, up: jax.Array, *addends: jax.Array | None) -> jax.Array:
    """Return what becomes of two products, each with what is added to it or None."""
    pairs = zip((gate, up), addends, strict=True)
    return silu_times(*(y if a is None else plus(y, a) for y, a in pairs))


# Whether something is added to gate and to up; always float32.
@pytest.mark.long
@pytest.mark.parametrize("popularity", ["skewed", "none"])
@pytest.mark.parametrize(
    ("dtype", "added"),
    [("float32", (False, True)), ("bfloat16", (True, True)), ("bfloat16", (False, False))],
)
def test_gate_and_up_have_the_bits_of_two_products_and_an_activation(dtype, added, popularity):
    case = grouped_case(40, 9, 200, 256, popularity=popularity, dtype=dtype, padding=20)
    given = [a if there else None for a, there in zip(addends(case, 2), added, strict=True)]
    x, gate, up, group_sizes = pair(case)
    got = gated_on_tpu(x, gate, up, group_sizes, *given)
    bias = jnp.zeros((9, 200)) if dtype == "float32" else None  # the other tests' program
    apart = [jnp.asarray(on_tpu(x, w, group_sizes, bias), dtype) for w in (gate, up)]
    rows = int(group_sizes.sum())
    same = np.asarray(activated(*apart, *given), np.float32)
    np.testing.assert_array_equal(got[:rows], same[:rows])
    want = meaning_of_two(x, gate, up, group_sizes, *given)
    np.testing.assert_allclose(got, np.asarray(want, np.float32), **TOLERANCE[dtype])
    assert not got[rows:].any()


@pytest.mark.long
def test_a_gated_row_has_the_same_bits_wherever_it_stands():
    case = grouped_case(40, 9, 200, 256, popularity="identical", dtype="bfloat16", padding=20)
    x, gate, up, group_sizes = pair(case)
    both = addends(case, 2)
    want = gated_on_tpu(x, gate, up, group_sizes, *both)
    # In other places, as the rows of three of the groups.
    rows = np.concatenate([np.random.default_rng(1).permutation(40), np.arange(40, 60)])
    sizes = jnp.array([0, 1, 0, 17, 0, 0, 22, 0, 0], jnp.int32)
    same = [jnp.broadcast_to(w[:1], w.shape) for w in (gate, up)]
    moved = gated_on_tpu(x[rows], *same, sizes, *(a[rows] for a in both))
    np.testing.assert_array_equal(moved, want[rows])
    one = jnp.array([1], jnp.int32)
    alone = gated_on_tpu(x[5:6], gate[:1], up[:1], one, *(a[5:6] for a in both))
    np.testing.assert_array_equal(alone, want[5:6])


@pytest.mark.long
def test_wide_pairs_are_cut_into_blocks(monkeypatch):
    """As one matrix is; and into fewer columns where VMEM would not hold 200 of both."""
    case = grouped_case(40, 5, 200, 384, dtype="bfloat16", padding=3)
    args = (*pair(case), *addends(case, 2))
    monkeypatch.setattr(pallas_tpu, "MAX_K_BLOCK", 128)
    monkeypatch.setattr(pallas_tpu, "VMEM_BYTES", 1 << 18)
    operands = pallas_tpu._Operands(2, 2, biased=False, addends=(4, 4))
    blocks = pallas_tpu._blocks(43, 5, 200, 384, operands)
    assert (blocks.column_blocks, blocks.depth_blocks) == (2, 3)
    got = interpreted(pallas_tpu.gated_matmul)(*args)
    want = meaning_of_two(*args)
    np.testing.assert_allclose(got, np.asarray(want, np.float32), **TOLERANCE["bfloat16"])


@pytest.mark.long
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
    with pytest.raises(NotImplementedError, match="gated_matmul: the TPU kernel runs on a TPU"):
        gated_matmul(case.x, case.w, case.w, case.group_sizes, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="4 rows of width 96"):
        on_tpu(*arguments(case))
    with pytest.raises(NotImplementedError, match="0 rows of width 128"):
        on_tpu(jnp.zeros((0, 128)), jnp.zeros((2, 4, 128)), case.group_sizes, None)
