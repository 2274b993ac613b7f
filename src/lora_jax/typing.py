"""Array types for signatures; the one place that imports jaxtyping.

One axis name means one thing everywhere: tokens, rows (a (token, expert) pair), slots (adapter
slots), experts, rank, d_in, d_out, pages, page_size, q_heads, kv_heads, head_dim, seqs.
"""

from jaxtyping import Array, Bool, Float, Int, Num, PyTree, Shaped, UInt8, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "Num", "PyTree", "Shaped", "UInt8", "UInt32"]
