"""Rotation and page writes of heads by the C++ kernel of ops/cpu/heads.h, after their norms.

Pages in 8 bits that the program does not own are written by C++ alone, the rest by XLA.
"""

import jax
import jax.numpy as jnp

from lora_jax.ops.acting_call import acting_call
from lora_jax.ops.cpu import build
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.kv_rows import CODED
from lora_jax.ops.pages import write_in_place
from lora_jax.ops.place_heads.args import PlaceHeadsArgs
from lora_jax.ops.place_heads.xla import turned
from lora_jax.ops.rms_norm import add_rms_norm
from lora_jax.typing import Array, Float


def place_heads(args: PlaceHeadsArgs) -> tuple[Array, Array, Array]:
    """Same result as the reference, the pages with `in_place` being the argument's own."""
    build.require()
    pages = args.k_pages, args.v_pages
    if args.k_pages.dtype == CODED:
        if not args.in_place:
            raise Declined("writes rows in 8 bits only into pages of a page pool, in place")
        q, k = turned(args)
        places = args.token_to_page_slot
        return write_in_place(q, pages[0], k, pages[1], jnp.asarray(args.v), places), *pages
    dtypes = {str(a.dtype) for a in (args.q, args.k, args.v, *pages)}
    if dtypes not in ({"float32"}, {"bfloat16"}):
        raise Declined(f"takes heads and pages in float32 or bfloat16, not {sorted(dtypes)}")
    q, k = args.q, args.k
    if args.scales is not None:
        q, k = _normed(q, args.scales[0], args), _normed(k, args.scales[1], args)
    name, out = (
        f"lora_jax_place_heads_{args.q.dtype.name}",
        jax.ShapeDtypeStruct(args.q.shape, args.q.dtype),
    )
    given = q, k, args.v, args.cos, args.sin, *pages, args.token_to_page_slot
    if args.in_place:
        return acting_call(name, out)(*given), *pages
    written = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (args.k_pages, args.v_pages)]
    call = jax.ffi.ffi_call(name, [out, *written], input_output_aliases={5: 1, 6: 2})
    turned_q, k_pages, v_pages = map(jnp.asarray, call(*given))
    return turned_q, k_pages, v_pages


def _normed(
    heads: Float[Array, "tokens heads head_dim"],
    scale: Float[Array, "head_dim"],
    args: PlaceHeadsArgs,
) -> Float[Array, "tokens heads head_dim"]:
    """Return the norm of every head of the first args.num_tokens tokens, 0 for others."""
    rows = None if args.num_tokens is None else args.num_tokens * heads.shape[1]
    flat = heads.reshape(-1, heads.shape[2])
    return add_rms_norm(flat, None, scale, args.eps, num_rows=rows)[1].reshape(heads.shape)
