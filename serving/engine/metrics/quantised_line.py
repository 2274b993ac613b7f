"""Line of a log about quantised weights; no jax and no routes, for agents and zygotes."""

from collections.abc import Mapping
from typing import Any


def quantised_line(summary: Mapping[str, Any]) -> str:
    """Return the line of a log for what the base's card says of quantised weights."""
    quantised, others = summary["parameters"] / 1e6, summary["other_parameters"] / 1e6
    return (
        f"Quantised weights: {quantised:.1f} M in {summary['format']} ({summary['method']}), "
        f"{summary['bits_per_parameter']:.2f} bits each; {others:.1f} M others are not."
    )
