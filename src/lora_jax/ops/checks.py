"""Checks of an op's arguments: dtypes and shapes that no implementation can take."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lora_jax.typing import Array

DTYPES = (jnp.float32, jnp.bfloat16)


def check_dtypes(op: str, **arrays: Any) -> None:
    """Raise ValueError unless all arrays share one of the dtypes that every op supports.

    Of a quantised weight it is the dtype that it stands for; None is an array that is absent.
    """
    dtypes = {name: a.dtype for name, a in arrays.items() if a is not None}
    first = next(iter(dtypes.values()))
    if first not in DTYPES or any(dtype != first for dtype in dtypes.values()):
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"{op}: dtypes must be equal and float32 or bfloat16, got {listed}")


def check_dtype(op: str, dtype: DTypeLike, **arrays: Array | jax.ShapeDtypeStruct) -> None:
    """Raise ValueError naming each array that is of another dtype: ids, sizes and factors."""
    for name, a in arrays.items():
        if a.dtype != dtype:
            raise ValueError(f"{op}: {name} {a.shape} is {a.dtype}, expected {jnp.dtype(dtype)}")


def check_shapes(op: str, **shapes: tuple[tuple[int, ...] | None, tuple[int, ...]]) -> None:
    """Raise ValueError naming each argument whose shape is not the one wanted.

    Each keyword is (shape or None if absent, wanted shape).
    """
    for name, (got, want) in shapes.items():
        if got is not None and got != want:
            raise ValueError(f"{op}: {name} has shape {got}, expected {want}")


def shape_of(array: Array | None) -> tuple[int, ...] | None:
    """Return the shape of an optional array."""
    return None if array is None else tuple(array.shape)
