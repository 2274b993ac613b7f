"""Number of GPUs that a process may use."""

import glob
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(environment: Mapping[str, str]) -> int:
    """Return how many GPUs the list of visible ones has; where there is none, the machine's."""
    visible = environment.get(VISIBLE)
    if visible is None:
        return len(glob.glob("/dev/nvidia[0-9]*"))
    return sum(bool(name.strip()) for name in visible.split(","))
