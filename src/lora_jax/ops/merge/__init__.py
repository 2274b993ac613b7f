"""Adds adapters to weights, or takes them out again: all matrices of a module in one call."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import (
    ANY,
    GPU,
    TPU,
    Declined,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.merge import reference, xla
from lora_jax.typing import Array, Float, Int

__all__ = ["merge", "merge_apart", "merge_writer", "mixture_slots"]

Maps = tuple[Float[Array, "d_out d_in"], ...]
MixedMaps = tuple[Array, ...]  # [d_out, d_in] of several shapes
Pools = tuple[tuple[Array, Array], ...]  # a_pool and b_pool of each shape of maps

MERGE = Op(
    "merge",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "merge"), hints=("in_place",)),
        Implementation("pallas_gpu", GPU, lazy_kernel(f"{__name__}.pallas_gpu", "merge")),
        Implementation("pallas_tpu", TPU, lazy_kernel(f"{__name__}.pallas_tpu", "merge")),
        Implementation("xla", ANY, xla.merge),
        Implementation("reference", ANY, reference.merge),
    ),
)


def merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    *,
    max_rank: int,
    in_place: bool = True,
    implementation: str | None = None,
) -> Float[Array, "matrices d_out d_in"]:
    """w[m] + scaling[m] * B^T A over the rank rows of site m; w is donated and written in place.

    Columns of `sites`: a_row, b_row (where the rows start in their pools) and rank, at most
    `max_rank`; rank 0 leaves the matrix as it is, bit for bit. A negative scaling unmerges: in
    float32 to within rounding; in bfloat16 each weight may end one rounding away from where it
    was, so that whoever must have the old bits back keeps a copy. (V-LoRA, section 4.4.1.)

    A caller that keeps w passes `in_place` False: a kernel that can then reads w once and writes
    the result elsewhere, in place of a copy and a second pass; the bits are the same.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _check("merge", w, a_pool, b_pool, sites, scaling, max_rank)
    args = (w, a_pool, b_pool, sites, scaling, max_rank)
    return MERGE.call(implementation, *args, in_place=in_place)


def merge_apart(
    maps: Maps,
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    *,
    max_rank: int,
) -> Maps:
    """Return maps[m] + scaling[m] * B^T A: `merge` of matrices in arrays of their own.

    All have one shape; they are kept, and the results are new arrays.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    _check_maps("merge_apart", maps)
    stacked = jax.ShapeDtypeStruct((len(maps), *maps[0].shape), maps[0].dtype)
    _check("merge_apart", stacked, a_pool, b_pool, sites, scaling, max_rank)
    each = ((w[None], sites[n : n + 1], scaling[n : n + 1]) for n, w in enumerate(maps))
    fixed: dict[str, Any] = {"max_rank": max_rank, "in_place": False}
    return tuple(merge(w, a_pool, b_pool, *site, **fixed)[0] for w, *site in each)


def _no_writer(maps: MixedMaps, results: MixedMaps, max_rank: int) -> Callable:
    """Decline: jax's own arrays never change."""
    raise Declined("writes over arrays by a kernel of a GPU only; merge_apart gives new ones")


MERGE_WRITER = Op(
    "merge_writer",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "merge_writer")),
        Implementation("xla", ANY, _no_writer),
    ),
)


def merge_writer(
    maps: MixedMaps, results: MixedMaps, *, max_rank: int, implementation: str | None = None
) -> Callable[..., Int[Array, ""]]:
    """Return a function that writes maps[m] + scaling[m] * B^T A over results[m], for all m.

    Maps of one shape follow each other. The function is called while a program is traced:

        token = write(pools, sites, scaling, token)

    `pools` are (a_pool, b_pool) of each shape of maps, in their order; `sites` and `scaling` are
    those of `merge`. A program does so in one launch, and takes neither the maps nor the results,
    each of which would cost its caller time: the function keeps both alive. So jax does not know
    that `results` change. The caller keeps the arrays and reads them on the device only, by later
    programs that take the token. A program has to be traced anew for other maps.

    Raises:
        Declined: no kernel does so on this device, or with these shapes; `merge_apart` does.
        ValueError: shapes or dtypes do not fit each other; also from the function, as it is traced.
    """
    _check_writer(maps, results, max_rank)
    write = MERGE_WRITER.call(implementation, maps, results, max_rank)
    return functools.partial(_write, write, maps, results, max_rank)


def _write(
    write: Callable[..., Int[Array, ""]],
    maps: MixedMaps,
    results: MixedMaps,
    max_rank: int,
    pools: Pools,
    sites: Int[Array, "maps 3"],
    scaling: Float[Array, "maps"],
    token: Int[Array, ""],
) -> Int[Array, ""]:
    """Check the arguments while a program is traced, and write; `results` are only kept alive."""
    del results
    op, groups = "merge_writer", [[*run] for _, run in itertools.groupby(maps, lambda w: w.shape)]
    if len(pools) != len(groups):
        raise ValueError(f"{op}: {len(groups)} shapes of maps, but {len(pools)} pairs of pools")
    count = len(maps)
    checks.check_shapes(op, sites=(sites.shape, (count, 3)), scaling=(scaling.shape, (count,)))
    for group, pair in zip(groups, pools, strict=True):
        w = jax.ShapeDtypeStruct((len(group), *group[0].shape), group[0].dtype)
        own = jax.ShapeDtypeStruct((len(group), 3), sites.dtype)
        _check(op, w, *pair, own, jax.ShapeDtypeStruct((len(group),), scaling.dtype), max_rank)
    return write(pools, sites, scaling, token)


def _check_writer(maps: MixedMaps, results: MixedMaps, max_rank: int) -> None:
    """Raise ValueError for results unlike their maps, or shapes that come in no order."""
    shapes = [w.shape for w in maps]
    if len({w.dtype for w in maps}) != 1 or any(w.ndim != 2 for w in maps):
        listed = _listed(maps)
        raise ValueError(f"merge_writer: maps must be matrices of one dtype, not {listed}")
    if len(maps) != len(results):
        raise ValueError(f"merge_writer: {len(maps)} maps, but {len(results)} results")
    for w, made in zip(maps, results, strict=True):
        if (w.shape, w.dtype) != (made.shape, made.dtype):
            pair = f"{w.dtype}{list(w.shape)} and {made.dtype}{list(made.shape)}"
            raise ValueError(f"merge_writer: a map and its result must be alike, not {pair}")
    runs = [shape for shape, _ in itertools.groupby(shapes)]
    if len(runs) != len(set(runs)):
        raise ValueError(f"merge_writer: maps of one shape must follow each other, not {shapes}")
    if max_rank < 1:
        raise ValueError(f"merge_writer: max_rank {max_rank} must be at least 1")


def _check_maps(op: str, maps: Maps) -> None:
    """Raise ValueError where maps are not matrices of one shape and dtype."""
    if len({(w.shape, w.dtype) for w in maps}) != 1 or maps[0].ndim != 2:
        raise ValueError(f"{op}: maps must be matrices of one shape and dtype, not {_listed(maps)}")


def _listed(maps: MixedMaps) -> str:
    """Return the dtypes and shapes of maps, each once."""
    return ", ".join(sorted({f"{w.dtype}{list(w.shape)}" for w in maps})) or "none"


def _check(
    op: str,
    w: Array | jax.ShapeDtypeStruct,
    a_pool: Array,
    b_pool: Array,
    sites: Array | jax.ShapeDtypeStruct,
    scaling: Array | jax.ShapeDtypeStruct,
    max_rank: int,
) -> None:
    """Raise ValueError where shapes or dtypes do not fit each other."""
    if w.ndim != 3 or a_pool.ndim != 2 or b_pool.ndim != 2:
        pools = f"a_pool {a_pool.shape} and b_pool {b_pool.shape} rank 2"
        raise ValueError(f"{op}: w {w.shape} must be rank 3, {pools}")
    if max_rank < 1:
        raise ValueError(f"{op}: max_rank {max_rank} must be at least 1")
    matrices, d_out, d_in = w.shape
    checks.check_dtypes(op, w=w, a_pool=a_pool, b_pool=b_pool)
    checks.check_shapes(
        op,
        a_pool=(tuple(a_pool.shape), (a_pool.shape[0], d_in)),
        b_pool=(tuple(b_pool.shape), (b_pool.shape[0], d_out)),
        sites=(tuple(sites.shape), (matrices, 3)),
        scaling=(tuple(scaling.shape), (matrices,)),
    )
    checks.check_dtype(op, jnp.int32, sites=sites)
    checks.check_dtype(op, jnp.float32, scaling=scaling)


def mixture_slots(
    row_to_slot: Int[Array, "rows"],
    merged_slot: Int[Array, ""] | int,
    surplus_slot: Int[Array, ""] | int,
) -> tuple[Int[Array, "rows"], Int[Array, "rows"]]:
    """Return the two slots that each row needs while one adapter is merged into the weights.

    A row of the merged adapter needs none. Any other row, base rows too, needs its own slot, and
    `surplus_slot`, whose part is subtracted: what the weights have too much (V-LoRA's deLoRA
    branch, section 4.4.2).
    """
    merged = row_to_slot == merged_slot
    own_slot = jnp.where(merged, jnp.int32(-1), row_to_slot)
    return own_slot, jnp.where(merged, jnp.int32(-1), jnp.int32(surplus_slot))
