"""Norms and turns heads of q and k and writes k and v into pages: one kernel on Hopper and CPUs."""

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
    """
    return PLACE_HEADS.call(implementation, args)
