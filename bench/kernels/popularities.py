"""The pair over all ranks, tokens and popularities, whether a peer was measured there or not."""

from bench.kernels import lora
from bench.kernels.jobs import Job, Machine
from lora_jax.ops.cases import POPULARITIES

WIDE = 14336  # d_out; d_in is 4096
SLOTS = 512
MOST_DISTINCT = 1024
TOKENS = (1, 16, 64, 256, 1024, 4096)
RANKS = (8, 16, 32, 64, 128)


def points() -> tuple[lora.Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says; batches of none have one rank."""
    return tuple(
        _point(popularity, tokens, rank)
        for popularity in POPULARITIES
        for rank in (RANKS if popularity != "none" else (64,))
        for tokens in TOKENS
    )


def _point(popularity: str, tokens: int, rank: int) -> lora.Point:
    slots = min(tokens, MOST_DISTINCT) if popularity == "distinct" else SLOTS
    name = f"{tokens} tokens, {popularity}, {slots} slots"
    return lora.Point(name, "pair", tokens, WIDE, rank, slots, popularity)


def jobs(points: list[lora.Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    return lora.jobs(points, machine)
