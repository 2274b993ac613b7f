"""Adds every row's own adapter to the base result of a linear map."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import (
    ANY,
    CPU,
    GPU,
    TPU,
    Implementation,
    Op,
    backend_kernel,
    lazy_kernel,
)
from lora_jax.ops.lora_gemm import cpu, reference, xla
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.rank_rows import stored_width
from lora_jax.typing import Array, Float, Int, Num

__all__ = ["LoraBatch", "check_maps", "delta_dtype", "lora_gemm", "lora_gemms"]

_Ys = Sequence[Array | None]
_Sites = Sequence[int | None]


def _site_by_site(kernel: Callable) -> Callable:
    """Return a kernel of several sites made of one that adds to the y of a single site."""

    def added(ys: _Ys, batch: LoraBatch, sites: _Sites):
        pairs = zip(ys, sites, strict=True)
        return tuple(kernel(batch.zeros() if y is None else y, batch.at(s)) for y, s in pairs)

    return added


def _sums_of_the_rows_dtype(ys: _Ys, batch: LoraBatch, sites: _Sites) -> str | None:
    del sites
    wide = {str(y.dtype) for y in ys if y is not None and y.dtype != batch.x.dtype}
    return f"takes y of x's dtype, {batch.x.dtype}, not {', '.join(wide)}" if wide else None


def _rows_of_the_same_dtype(ys: _Ys, batch: LoraBatch, sites: _Sites) -> str | None:
    del ys, sites
    return "takes rank rows of x's dtype, not in 8 bits" if batch.has_int8_rows else None


def _pallas(name: str) -> Callable:
    return _site_by_site(lazy_kernel(f"{__name__}.{name}", "lora_gemm"))


_NARROW = (_rows_of_the_same_dtype, _sums_of_the_rows_dtype)
LORA_GEMM = Op(
    "lora_gemm",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "lora_gemm"), hints=("zeros_if_idle",)),
        Implementation("pallas_gpu", GPU, _pallas("pallas_gpu"), accepts=_NARROW),
        Implementation("pallas_tpu", TPU, _pallas("pallas_tpu"), accepts=_NARROW),
        Implementation("ffi", CPU, cpu.lora_gemm, wide_sums=True),
        Implementation("xla", ANY, _site_by_site(xla.lora_gemm), wide_sums=True),
        Implementation("reference", ANY, _site_by_site(reference.lora_gemm), wide_sums=True),
    ),
)


def lora_gemm(
    y: Float[Array, "rows d_out"] | None,
    x: Float[Array, "rows d_in"],
    a_pool: Num[Array, "a_rows a_items"],
    b_pool: Num[Array, "b_rows b_items"],
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

    LoraBatch describes the tables; both pools hold rows of x's dtype, or both rows in 8 bits. Rows
    of slot -1 come back unchanged, bit for bit, and cost nothing. The kernel works in place if y is
    a temporary. y may be float32 with rows and pools in bfloat16, for a sum that is rounded
    elsewhere. Without y the sums alone come back, in delta_dtype: rows of slot -1 are exact zeros.
    Kernels of CUDA and C++ have no gradient and no vmap; implementation="xla" has both.
    Raises ValueError naming the argument whose shape or dtype is wrong.
    """
    if row_to_expert is None:
        row_to_expert = jnp.zeros(x.shape[:1], jnp.int32)
    owners = (row_to_slot, row_to_expert)
    batch = LoraBatch(x, a_pool, b_pool, entries, scaling, *owners, max_rank, items)
    ys = _or_wide_zeros([y], batch, implementation)
    _check(ys[0], batch)
    return LORA_GEMM.call(implementation, ys, batch, (None,))[0]


def lora_gemms(
    ys: Sequence[Float[Array, "rows d_out"] | None],
    x: Float[Array, "rows d_in"],
    a_pool: Num[Array, "a_rows a_items"],
    b_pool: Num[Array, "b_rows b_items"],
    entries: Int[Array, "sites slots 5"],
    scaling: Float[Array, "sites slots"],
    sites: Sequence[int],
    row_to_slot: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"] | None = None,
    *,
    max_rank: int,
    items: AdapterItems | None = None,
    zeros_if_idle: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows d_out"], ...]:
    """Return lora_gemm of each y with the entries and scaling of its site, in one launch.

    It is one launch on Hopper and one call on a CPU. So maps of the same rows that have the same
    widths, such as gate and up, cost their bytes and not a launch each. The table comes whole,
    since cutting a site out of it is a copy, and a copy a launch. Bits are those of lora_gemm.
    Either all y are None or none is. Without y and with zeros_if_idle=False, the sums may hold
    anything in a call none of whose rows has an adapter: for readers who ask for that first.

    Raises ValueError naming the argument whose shape or dtype is wrong, and where some y are None.
    """
    if len({y is None for y in ys}) > 1:
        raise ValueError("lora_gemms: some y are None, others not: a launch adds to all or to none")
    if row_to_expert is None:
        row_to_expert = jnp.zeros(x.shape[:1], jnp.int32)
    owners = (row_to_slot, row_to_expert)
    batch = LoraBatch(x, a_pool, b_pool, entries, scaling, *owners, max_rank, items)
    ys = _or_wide_zeros(ys, batch, implementation)
    check_maps(ys, batch, sites)
    return LORA_GEMM.call(implementation, ys, batch, tuple(sites), zeros_if_idle=zeros_if_idle)


def delta_dtype(dtype: jnp.dtype, implementation: str | None = None) -> jnp.dtype:
    """Return the dtype of deltas of rows of a dtype on this platform, or by the named one.

    Engines and LoRA Servers give this dtype, so that sums have the same bits: float32 where the
    preferred implementation gives that for nothing, so that one rounding is left to the sum; else
    the rows' own.
    """
    wide = LORA_GEMM.candidates(implementation)[0].wide_sums
    return jnp.dtype(jnp.float32) if wide else jnp.dtype(dtype)


def _or_wide_zeros(ys: _Ys, batch: LoraBatch, implementation: str | None) -> list[Array | None]:
    """Return the ys, zeros in place of None where deltas are wider than x."""
    dtype = delta_dtype(batch.x.dtype, implementation)
    if dtype == batch.x.dtype:
        return list(ys)
    return [batch.zeros(dtype) if y is None else y for y in ys]


def check_maps(ys: _Ys, batch: LoraBatch, sites: Sequence[int]) -> None:
    """Raise ValueError naming what has a wrong shape or dtype, or sites that the table has not."""
    if len(ys) != len(sites) or not all(0 <= site < batch.entries.shape[0] for site in sites):
        got = f"{len(ys)} y, sites {tuple(sites)} of a table of {batch.entries.shape[0]}"
        raise ValueError(f"lora_gemms: each map needs a site of the table, got {got}")
    for y in ys:
        _check(y, batch)


def _check(y: Array | None, batch: LoraBatch) -> None:
    """Raise ValueError naming what has a wrong shape or dtype."""
    x, a_pool, b_pool, max_rank = batch.x, batch.a_pool, batch.b_pool, batch.max_rank
    lead = batch.entries.shape[:-2]  # of all sites, or none
    given = {"y": y, "x": x, "a_pool": a_pool, "b_pool": b_pool}
    wrong = [f"{n} {v.shape}" for n, v in given.items() if v is not None and v.ndim != 2]
    if batch.entries.ndim not in (2, 3):
        wrong.append(f"entries {batch.entries.shape} of one site")
    if wrong:
        raise ValueError(f"lora_gemm: {', '.join(wrong)} must be rank 2")
    if max_rank < 1:
        raise ValueError(f"lora_gemm: max_rank {max_rank} must be at least 1")
    rows, d_in, slots = *x.shape, batch.entries.shape[-2]
    d_out = batch.d_out if y is None else y.shape[1]
    narrow = None if y is None or y.dtype == jnp.float32 else y
    if batch.has_int8_rows:
        checks.check_dtypes("lora_gemm", y=narrow, x=x)
        checks.check_dtype("lora_gemm", jnp.int8, b_pool=b_pool)
    else:
        checks.check_dtypes("lora_gemm", y=narrow, x=x, a_pool=a_pool, b_pool=b_pool)
    a_items, b_items = (stored_width(n, a_pool.dtype) for n in (d_in, d_out))
    owners = {"row_to_slot": batch.row_to_slot, "row_to_expert": batch.row_to_expert}
    checks.check_shapes(
        "lora_gemm",
        y=((rows, d_out) if y is None else tuple(y.shape), (rows, d_out)),
        a_pool=(tuple(a_pool.shape), (a_pool.shape[0], a_items)),
        b_pool=(tuple(b_pool.shape), (b_pool.shape[0], b_items)),
        entries=(tuple(batch.entries.shape), (*lead, slots, 5)),
        scaling=(tuple(batch.scaling.shape), (*lead, slots)),
        **{name: (tuple(owner.shape), (rows,)) for name, owner in owners.items()},
        items=(None if batch.items is None else tuple(batch.items.order.shape), (rows,)),
    )
    checks.check_dtype("lora_gemm", jnp.int32, entries=batch.entries, **owners)
    checks.check_dtype("lora_gemm", jnp.float32, scaling=batch.scaling)
