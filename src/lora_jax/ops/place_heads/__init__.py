"""Norms and turns heads of q and k and writes k and v into pages: one kernel on Hopper and CPUs."""

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, CPU, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.kv_rows import CODED
from lora_jax.ops.place_heads import cpu, reference, xla
from lora_jax.ops.place_heads.args import PlaceHeadsArgs
from lora_jax.typing import Array

__all__ = ["PlaceHeadsArgs", "place_heads"]


def _plain_pages(args: PlaceHeadsArgs) -> str | None:
    return "writes pages of k's dtype, not in 8 bits" if args.k_pages.dtype == CODED else None


def _new_pages(args: PlaceHeadsArgs) -> str | None:
    return "returns new pages and writes none in place" if args.in_place else None


PLACE_HEADS = Op(
    "place_heads",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "place_heads"), accepts=(_plain_pages,)),
        Implementation("ffi", CPU, cpu.place_heads),
        Implementation("xla", ANY, xla.place_heads, accepts=(_new_pages,), stands_in=True),
        Implementation("reference", ANY, reference.place_heads, accepts=(_new_pages,)),
    ),
)


def place_heads(
    args: PlaceHeadsArgs, *, implementation: str | None = None
) -> tuple[Array, Array, Array]:
    """Return q turned by its tokens' angles, and the pages with k, turned too, and v in them.

    The caller donates the pages, which may be written in place. With args.in_place they are, and
    come back as they are: whatever reads them must take this q.

    Raises:
        ValueError: shapes do not fit each other, or the indices are no int32.
    """
    _check(args)
    return PLACE_HEADS.call(implementation, args)


def _check(args: PlaceHeadsArgs) -> None:
    """Raise ValueError for shapes by which a kernel would write beside the pages."""
    tokens, kv_heads, k_dim = args.k.shape
    pages, coded = args.k_pages.shape[:2], args.k_pages.dtype == CODED
    k_items, v_items = (
        a.shape[3] if coded else heads.shape[2]
        for a, heads in ((args.k_pages, args.k), (args.v_pages, args.v))
    )
    half = args.cos.shape[-1]
    checks.check_shapes(
        "place_heads",
        q=(tuple(args.q.shape), (tokens, args.q.shape[1], k_dim)),
        v=(tuple(args.v.shape), (tokens, kv_heads, args.v.shape[2])),
        cos=(tuple(args.cos.shape), (tokens, half)),
        sin=(tuple(args.sin.shape), (tokens, half)),
        k_pages=(tuple(args.k_pages.shape), (*pages, kv_heads, k_items)),
        v_pages=(tuple(args.v_pages.shape), (*pages, kv_heads, v_items)),
        token_to_page_slot=(tuple(args.token_to_page_slot.shape), (tokens,)),
    )
    checks.check_dtype("place_heads", jnp.int32, token_to_page_slot=args.token_to_page_slot)
    if 2 * half > k_dim:
        raise ValueError(f"place_heads: {half} angles a token turn {2 * half} of {k_dim} numbers")
