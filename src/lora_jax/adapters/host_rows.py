"""Matrices of an adapter on the host, as runs of rows that can be copied at once. No jax."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from lora_jax.rank_rows import value_width


@dataclasses.dataclass(frozen=True, eq=False)
class HostRun:
    """Matrices of one width whose rows [n, width] follow each other in the host's memory.

    `numbers` are those of the matrices, `counts` their rows; `rows` are all of them together.
    """

    width: int
    numbers: tuple[int, ...]
    counts: tuple[int, ...]
    rows: np.ndarray


def host_runs(matrices: Iterable[np.ndarray]) -> tuple[HostRun, ...]:
    """Return matrices [experts or 1, rank, width], numbered in their order, as few runs."""
    by_width: dict[int, list[list[tuple[int, np.ndarray]]]] = {}
    for number, matrix in enumerate(matrices):
        rows = matrix.reshape(-1, *matrix.shape[2:])
        runs = by_width.setdefault(value_width(matrix.shape[-1], matrix.dtype), [])
        if runs and follows(runs[-1][-1][1], rows):
            runs[-1].append((number, rows))
        else:
            runs.append([(number, rows)])
    return tuple(
        HostRun(
            width,
            tuple(number for number, _ in run),
            tuple(len(rows) for _, rows in run),
            as_one([rows for _, rows in run]),
        )
        for width, runs in by_width.items()
        for run in runs
    )


def follows(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether rows lie right behind others in the memory of the same owner."""
    return (
        one.base is not None  # an owner: what lies behind another array's memory is nobody's
        and one.base is other.base
        and one.dtype == other.dtype
        and one.shape[1:] == other.shape[1:]
        and one.flags.c_contiguous
        and other.flags.c_contiguous
        and one.ctypes.data + one.nbytes == other.ctypes.data
    )


def as_one(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows that follow each other as one array over the same memory."""
    if len(parts) == 1:
        return parts[0]
    first, count = parts[0], sum(len(part) for part in parts)
    return as_strided(first, (count, *first.shape[1:]), first.strides, writeable=False)
