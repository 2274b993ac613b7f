"""Adds every row's own adapter to the base result of a linear map."""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from lora_jax.ops import dispatch
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.lora_gemm import cpu, reference, xla
from lora_jax.typing import Array, Float, Int

__all__ = ["delta_dtype", "lora_gemm", "lora_gemms"]

_KERNELS = {
    "cuda": dispatch.backend("cuda", "lora_gemm"),
    "pallas_gpu": dispatch.late("lora_jax.ops.lora_gemm.pallas_gpu", "lora_gemm"),
    "pallas_tpu": dispatch.late("lora_jax.ops.lora_gemm.pallas_tpu", "lora_gemm"),
    "ffi": cpu.lora_gemm,
    "xla": xla.lora_gemm,
    "reference": reference.lora_gemm,
}
_NARROW_ROWS = ("cuda", "ffi", "xla", "reference")  # take bfloat16 rows to float32 results


def lora_gemm(
    y: Float[Array, "rows d_out"] | None,
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "slots 5"],
    scaling: Float[Array, "slots"],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"] | None = None,
    *,
    max_rank: int,
    items: AdapterItems | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows d_out"]:
    """y[t] + s * sum_j (x[t] . A[j]) B[j] over the rank rows of slot row_to_slot[t].

    Columns of `entries`: a_offset, b_offset, rank, a_stride, b_stride; expert e's rows start at
    offset + e * stride of its pool. No rank exceeds `max_rank`. Rows of slot -1 come back
    unchanged, bit for bit, and cost nothing. The kernel works in place if y is a temporary. y may
    be float32 with rows and pools in bfloat16, for a sum that is rounded elsewhere. Without y the
    sums alone come back, in delta_dtype: rows of slot -1 are exact zeros.
    `items` are the rows', if they are known already: a kernel that wants them need not make them.
    """
    if row_to_expert is None:
        row_to_expert = jnp.zeros(x.shape[:1], jnp.int32)
    (y,) = _or_wide_zeros([y], x, b_pool, implementation)
    arrays = (y, x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert)
    _check(*arrays, max_rank, items)
    kernels = {n: kernel if n == "cuda" else _with_y(kernel) for n, kernel in _KERNELS.items()}
    if y is not None and y.dtype != x.dtype:
        kernels = {n: kernels[n] for n in _NARROW_ROWS}
    if items is not None and "cuda" in kernels:
        kernels = kernels | {"cuda": functools.partial(kernels["cuda"], items=items)}
    return dispatch.call(kernels, implementation, *arrays, max_rank)


def lora_gemms(
    ys: Sequence[Float[Array, "rows d_out"] | None],
    x: Float[Array, "rows d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    entries: Int[Array, "sites slots 5"],
    scaling: Float[Array, "sites slots"],
    sites: Sequence[int],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"] | None = None,
    *,
    max_rank: int,
    items: AdapterItems | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows d_out"], ...]:
    """Return lora_gemm of each y with the entries and scaling of its site; one launch on Hopper.

    So maps of the same rows that have the same widths, such as gate and up, cost their bytes and
    not a launch each. The table comes whole, since cutting a site out of it is a copy, and a copy a
    launch. Bits are those of lora_gemm. Either all y are None or none is.
    """
    if len(ys) != len(sites) or not all(0 <= site < entries.shape[0] for site in sites):
        said = f"{len(ys)} y, sites {tuple(sites)} of a table of {entries.shape[0]}"
        raise ValueError(f"lora_gemms: each map needs a site of the table, got {said}")
    if len({y is None for y in ys}) > 1:
        raise ValueError("lora_gemms: some y are None, others not: a launch adds to all or to none")
    if row_to_expert is None:
        row_to_expert = jnp.zeros(x.shape[:1], jnp.int32)
    pools, owners = (x, a_pool, b_pool), (row_to_slot, row_to_expert)
    ys = _or_wide_zeros(ys, x, b_pool, implementation)
    for y in ys:
        _check(y, *pools, entries[0], scaling[0], *owners, max_rank, items)
    cuda = functools.partial(dispatch.backend("cuda", "lora_gemms"), items=items, sites=sites)
    one_by_one = functools.partial(_one_by_one, sites)
    kernels: dict[str, Callable] = {n: functools.partial(one_by_one, n) for n in _KERNELS}
    modules = tuple((y, entries, scaling) for y in ys)
    return dispatch.call(
        kernels | {"cuda": cuda}, implementation, modules, *pools, *owners, max_rank
    )


def delta_dtype(dtype: jnp.dtype, implementation: str | None = None) -> jnp.dtype:
    """Return what deltas of rows of a dtype are added in on this platform, or by what is named.

    Whoever computes them, an engine or a LoRA Server, gives these, so that sums have the same bits:
    float32 where the kernels give that for nothing, so that one rounding is left to the sum; else
    the rows' own.
    """
    wide = dispatch.candidates(implementation)[0] in ("ffi", "xla", "reference")
    return jnp.dtype(jnp.float32) if wide else jnp.dtype(dtype)


def _one_by_one(
    sites, implementation: str, modules, x, a_pool, b_pool, row_to_slot, row_to_expert, max_rank
):
    options = {"max_rank": max_rank, "implementation": implementation}
    owners, pools = (row_to_slot, row_to_expert), (x, a_pool, b_pool)
    return tuple(
        lora_gemm(_or_zeros(y, x, b_pool), *pools, entries[site], scaling[site], *owners, **options)
        for (y, entries, scaling), site in zip(modules, sites, strict=True)
    )


def _with_y(kernel: Callable) -> Callable:
    """Return the kernel that adds to zeros where there is no y."""

    def added(y, x, a_pool, b_pool, *others):
        return kernel(_or_zeros(y, x, b_pool), x, a_pool, b_pool, *others)

    return added


def _or_zeros(y: Array | None, x: Array, b_pool: Array, dtype: jnp.dtype | None = None) -> Array:
    return jnp.zeros((x.shape[0], b_pool.shape[1]), dtype or x.dtype) if y is None else y


def _or_wide_zeros(ys, x: Array, b_pool: Array, implementation: str | None) -> list[Array | None]:
    """Return the ys, zeros in place of None where deltas are wider than x."""
    dtype = delta_dtype(x.dtype, implementation)
    return [y if dtype == x.dtype else _or_zeros(y, x, b_pool, dtype) for y in ys]


def _check(
    y, x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert, max_rank, items
) -> None:
    """Raise ValueError naming what has a wrong shape or dtype."""
    given = {"y": y, "x": x, "a_pool": a_pool, "b_pool": b_pool, "entries": entries}
    wrong = [f"{n} {v.shape}" for n, v in given.items() if v is not None and v.ndim != 2]
    if wrong:
        raise ValueError(f"lora_gemm: {', '.join(wrong)} must be rank 2")
    if max_rank < 1:
        raise ValueError(f"lora_gemm: max_rank {max_rank} must be at least 1")
    rows, d_in, slots = *x.shape, entries.shape[0]
    d_out = b_pool.shape[1] if y is None else y.shape[1]
    narrow = None if y is None or y.dtype == jnp.float32 else y
    dispatch.check_dtypes("lora_gemm", y=narrow, x=x, a_pool=a_pool, b_pool=b_pool)
    dispatch.check_shapes(
        "lora_gemm",
        y=((rows, d_out) if y is None else tuple(y.shape), (rows, d_out)),
        a_pool=(tuple(a_pool.shape), (a_pool.shape[0], d_in)),
        b_pool=(tuple(b_pool.shape), (b_pool.shape[0], d_out)),
        entries=(tuple(entries.shape), (slots, 5)),
        scaling=(tuple(scaling.shape), (slots,)),
        row_to_slot=(tuple(row_to_slot.shape), (rows,)),
        row_to_expert=(tuple(row_to_expert.shape), (rows,)),
        items=(None if items is None else tuple(items.order.shape), (rows,)),
    )
    owners = {"row_to_slot": row_to_slot, "row_to_expert": row_to_expert}
    dispatch.check_dtype("lora_gemm", jnp.int32, entries=entries, **owners)
    dispatch.check_dtype("lora_gemm", jnp.float32, scaling=scaling)
