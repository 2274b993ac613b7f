"""Tolerances of kernels per dtype: the one table.

Cases are scaled to results of order one. float32: sums of some thousand products. bfloat16: two
roundings to 8 bits, one of an input sum and one of the result.
"""

from typing import Any

TOLERANCE: dict[str, dict[str, Any]] = {
    "float32": {"rtol": 2e-5, "atol": 2e-5},
    "bfloat16": {"rtol": 1.6e-2, "atol": 1.6e-2},
}
