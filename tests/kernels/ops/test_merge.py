"""Merge: every implementation against float64; unmerged and mixed rows are what they were."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops import merge as module
from lora_jax.ops.cases import MergeCase, lora_case, merge_case
from lora_jax.ops.dispatch import ANY, Declined, Implementation, Op
from lora_jax.ops.lora_gemm import lora_gemm
from lora_jax.ops.merge import merge, merge_apart, merge_writer, mixture_slots

IMPLEMENTATIONS = ["xla", "reference"]
jitted = functools.partial(jax.jit, static_argnames=("max_rank", "implementation"))(merge)


def oracle(case: MergeCase) -> np.ndarray:
    """Return the answer in float64, matrix by matrix."""
    w = np.asarray(case.w, np.float64)
    a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.a_pool, case.b_pool))
    for m, (a_row, b_row, rank) in enumerate(np.asarray(case.sites)):
        w[m] += float(case.scaling[m]) * b_pool[b_row:][:rank].T @ a_pool[a_row:][:rank]
    return w


def run(case: MergeCase, implementation: str) -> np.ndarray:
    """Return the op's result as float32, which is exact."""
    options = {"max_rank": case.max_rank, "implementation": implementation}
    return np.asarray(jitted(*case.arrays, **options).astype(jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_matches_float64(dtype, implementation):
    case = merge_case(5, 40, 24, ranks=(16, 0, 1, 7, 8), dtype=dtype)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_matrix_without_rank_keeps_its_bits(implementation):
    case = merge_case(2, 16, 8, ranks=(0, 4))
    w = case.w.at[0, 0, 0].set(-0.0).at[0, 1, 1].set(jnp.nan)
    got = run(dataclasses.replace(case, w=w), implementation)
    np.testing.assert_array_equal(got[0].view(np.int32), np.asarray(w[0]).view(np.int32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_foreign_rows_of_the_pools_do_not_matter(implementation):
    """Under one `max_rank`: XLA's product may order its sums by the rows that it is given."""
    case = dataclasses.replace(merge_case(1, 16, 8, ranks=(3,)), max_rank=8)
    start = int(case.sites[0, 0])
    own = (jnp.arange(len(case.a_pool)) >= start) & (jnp.arange(len(case.a_pool)) < start + 3)
    nan = jnp.float32(jnp.nan)
    poisoned = dataclasses.replace(
        case,
        a_pool=jnp.where(own[:, None], case.a_pool, nan),
        b_pool=jnp.where(own[:, None], case.b_pool, nan),
    )
    np.testing.assert_array_equal(run(poisoned, implementation), run(case, implementation))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_unmerging_gives_the_old_weights_back(implementation):
    case = merge_case(3, 40, 24, ranks=(16, 2, 5))
    merged = dataclasses.replace(case, w=jnp.asarray(run(case, implementation)))
    back = run(dataclasses.replace(merged, scaling=-case.scaling), implementation)
    np.testing.assert_allclose(back, np.asarray(case.w), rtol=0, atol=2e-6)


def test_rows_of_a_mixture_are_those_of_the_plain_weights():
    """y of merged weights, plus own adapter, minus the merged one, for every row."""
    case = lora_case(30, 48, 40, ranks=(16, 8, 4), popularity="uniform")
    slots = case.row_to_slot.at[::7].set(-1)
    w = merge_case(1, 48, 40, ranks=(1,), seed=5).w
    site, scaling = case.entries[1:2, :3], case.scaling[1:2]
    merged = merge(w, case.a_pool, case.b_pool, site, scaling, max_rank=16)[0]
    entries = jnp.concatenate([case.entries, case.entries[1:2]])
    scalings = jnp.concatenate([case.scaling, -scaling])
    own, negative = mixture_slots(slots, 1, 3)

    def add(y, rows_to_slot):
        pools = (case.a_pool, case.b_pool, entries, scalings)
        return lora_gemm(y, case.x, *pools, rows_to_slot, max_rank=16)

    got = add(add(case.x @ merged.T, own), negative)
    np.testing.assert_allclose(got, add(case.x @ w[0].T, slots), rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_input_names_the_sizes():
    case = merge_case(2, 16, 8)
    with pytest.raises(ValueError, match=r"sites has shape \(1, 3\), expected \(2, 3\)"):
        merge(case.w, case.a_pool, case.b_pool, case.sites[:1], case.scaling, max_rank=8)
    with pytest.raises(ValueError, match="dtypes must be equal"):
        merge(
            case.w.astype(jnp.bfloat16),
            case.a_pool,
            case.b_pool,
            case.sites,
            case.scaling,
            max_rank=8,
        )
    with pytest.raises(ValueError, match="max_rank 0 must be at least 1"):
        merge(*case.arrays, max_rank=0)
    with pytest.raises(ValueError, match=r"w \(16, 8\) must be rank 3"):
        merge(case.w[0], *case.arrays[1:], max_rank=8)
    wrong = dataclasses.replace(case, sites=case.sites.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"sites \(2, 3\) is float32, expected int32"):
        merge(*wrong.arrays, max_rank=8)


def test_maps_apart_have_the_bits_of_a_map_each():
    case = merge_case(3, 40, 24, ranks=(16, 0, 7))
    maps = tuple(case.w)
    made = jax.jit(functools.partial(merge_apart, max_rank=16))(maps, *case.arrays[1:])
    rest = case.a_pool, case.b_pool
    for n, (w, got) in enumerate(zip(maps, made, strict=True)):
        one = case.sites[n : n + 1], case.scaling[n : n + 1]
        want = jitted(w[None], *rest, *one, max_rank=16)[0]
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.usefixtures("shapes_unchecked")
def test_maps_apart_must_have_one_shape():
    case = merge_case(2, 16, 8)
    rest = case.arrays[1:]
    for maps in ((), (case.w[0], case.w[1, :8]), (case.w, case.w)):
        with pytest.raises(ValueError, match="maps must be matrices of one shape"):
            merge_apart(maps, *rest, max_rank=8)
    with pytest.raises(ValueError, match=r"sites has shape \(2, 3\), expected \(1, 3\)"):
        merge_apart((case.w[0],), *rest, max_rank=8)


def test_only_a_gpu_writes_over_results():
    w = merge_case(1, 16, 8).w[0]
    with pytest.raises(Declined, match="merge_writer declares cuda"):
        merge_writer((w,), (w,), max_rank=8)


@pytest.mark.usefixtures("shapes_unchecked")
def test_bad_places_are_named():
    w, other = merge_case(1, 16, 8).w[0], merge_case(1, 8, 8).w[0]
    with pytest.raises(
        ValueError, match=r"must be alike, not float32\[16, 8\] and float32\[8, 8\]"
    ):
        merge_writer((w,), (other,), max_rank=8)
    with pytest.raises(ValueError, match="maps of one shape must follow each other"):
        merge_writer((w, other, w), (w, other, w), max_rank=8)
    for maps, found in (
        ((), "none"),
        ((w, w.astype(jnp.bfloat16)), r"bfloat16\[16, 8\], float32\[16, 8\]"),
        ((w[None],), r"float32\[1, 16, 8\]"),
    ):
        with pytest.raises(ValueError, match=f"maps must be matrices of one dtype, not {found}"):
            merge_writer(maps, maps, max_rank=8)
    with pytest.raises(ValueError, match="max_rank 0 must be at least 1"):
        merge_writer((w,), (w,), max_rank=0)


@pytest.fixture
def written(monkeypatch):
    """Let a stand-in write on any platform; return a list that grows by each call."""
    calls = []

    def writer(maps, results, max_rank):
        return lambda *given: (calls.append(len(given)), given[-1])[1]

    op = Op("merge_writer", (Implementation("cuda", ANY, writer),))
    monkeypatch.setattr(module, "MERGE_WRITER", op)
    return calls


@pytest.mark.usefixtures("shapes_unchecked")
def test_what_a_writer_gets_must_fit_its_maps(written):
    cases = merge_case(2, 16, 8), merge_case(1, 8, 16)
    maps = tuple(w for case in cases for w in case.w)
    write = jax.jit(merge_writer(maps, maps, max_rank=8))
    pools = tuple((case.a_pool, case.b_pool) for case in cases)
    sites = jnp.concatenate([case.sites for case in cases])
    scaling, token = jnp.concatenate([case.scaling for case in cases]), jnp.int32(7)
    assert int(write(pools, sites, scaling, token)) == 7
    narrow = ((pools[0][0][:, :4], pools[0][1]), pools[1])
    for given, why in (
        ((pools[:1], sites, scaling), "2 shapes of maps, but 1 pairs of pools"),
        (((*pools, pools[0]), sites, scaling), "2 shapes of maps, but 3 pairs of pools"),
        ((narrow, sites, scaling), r"a_pool has shape \(\d+, 4\), expected \(\d+, 8\)"),
        ((pools, sites[:2], scaling), r"sites has shape \(2, 3\), expected \(3, 3\)"),
        ((pools, sites, scaling[:2]), r"scaling has shape \(2,\), expected \(3,\)"),
        ((pools, sites.astype(jnp.float32), scaling), "is float32, expected int32"),
    ):
        with pytest.raises(ValueError, match=f"merge_writer: .*{why}"):
            write(*given, token)
    for _ in range(3):
        write(pools, sites, scaling, token)
    assert len(written) == 1, "arguments are checked while a program is traced, and not again"


@pytest.mark.usefixtures("written")
def test_a_writer_keeps_its_arrays_until_it_is_gone():
    case = merge_case(1, 16, 8)
    maps, results = (jnp.copy(case.w[0]),), (jnp.copy(case.w[0]),)
    kept = [weakref.ref(*maps), weakref.ref(*results)]
    write = jax.jit(merge_writer(maps, results, max_rank=8))
    del maps, results
    write(((case.a_pool, case.b_pool),), case.sites, case.scaling, jnp.int32(0))
    assert all(ref() is not None for ref in kept)
    del write
    gc.collect()
    assert all(ref() is None for ref in kept)


@pytest.mark.gpu
@pytest.mark.parametrize("max_rank", [64, 128])  # their tiles differ
def test_on_a_gpu_results_of_several_shapes_have_the_bits_of_one_array(max_rank):
    ranks = (max_rank, 0, 33, 1, 16)
    cases = [
        merge_case(count, d_out, 2048, ranks=ranks, dtype="bfloat16", seed=d_out)
        for count, d_out in ((50, 1408), (3, 256))
    ]
    maps = tuple(w for case in cases for w in case.w)
    results = jax.tree.map(lambda w: jnp.full_like(w, jnp.nan), maps)
    write = merge_writer(maps, results, max_rank=max_rank)
    pools = tuple((case.a_pool, case.b_pool) for case in cases)
    sites = jnp.concatenate([case.sites for case in cases])
    scaling = jnp.concatenate([case.scaling for case in cases])
    token = jax.jit(write)(pools, sites, scaling, jnp.int32(7))
    assert int(token) == 7
    want = [w for case in cases for w in jitted(*case.arrays, max_rank=max_rank)]
    for got, one in zip(jax.tree.map(jnp.copy, results), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(one))


@pytest.mark.gpu
def test_on_a_gpu_what_is_written_elsewhere_has_the_bits_of_in_place():
    case = merge_case(3, 1408, 2048, ranks=(64, 0, 33), dtype="bfloat16")
    made = [
        jax.jit(functools.partial(merge, max_rank=64, in_place=in_place))(*case.arrays)
        for in_place in (True, False)
    ]
    np.testing.assert_array_equal(*(np.asarray(w).view(np.int16) for w in made))
