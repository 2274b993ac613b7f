"""Peers that are timed in the same run, where the machine has them."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax


class Result:
    """A result of torch's; waiting for it waits for the device."""

    def __init__(self, torch: Any, value: Any):
        self.torch, self.value = torch, value

    def block_until_ready(self) -> "Result":
        """Wait until the device has made it."""
        self.torch.cuda.synchronize()
        return self


def torch_grouped_matmul(
    xs: list[jax.Array], w: jax.Array, sizes: jax.Array
) -> Callable[[], Result] | None:
    """Return what torch's grouped matmul does with each x and the same weights, if it is here."""
    if importlib.util.find_spec("torch") is None:
        return None
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    rows = [torch.from_dlpack(x) for x in xs]
    matrices = torch.from_dlpack(w).transpose(1, 2)
    ends = torch.from_dlpack(sizes).cumsum(0, dtype=torch.int32)
    return lambda: Result(torch, [torch._grouped_mm(x, matrices, offs=ends) for x in rows])
