"""Quantised tensors of checkpoints, one file per library that writes them.

Each shows a matrix [d_out, d_in] where the files have codes, scales and zero points. It is read as
the parts of a device form (ops.grouped_matmul), or as the plain values that those stand for.
"""

from lora_jax.models.quantised.grouping import with_quantised

__all__ = ["with_quantised"]
