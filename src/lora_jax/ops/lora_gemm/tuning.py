"""Tuning interface of the Mosaic GPU kernels of LoRA.

A shape's `slots` are those of the adapters' table, its `rank` is the largest that it may hold.
"""

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cases import MODELS, popular
from lora_jax.ops.lora_gemm import pallas_gpu
from lora_jax.ops.lora_gemm._gpu_schedule import LoraGemmConfig, find_config, fitted
from lora_jax.ops.lora_gemm.batch import LoraBatch
from lora_jax.ops.tuning_programs import Shape, Tunable

# In order of what serving meets most; a shape serves those of half and twice its sizes.
ROWS = (128, 8, 32, 512, 2048)
SLOTS = (64, 8, 512)
RANKS = (16, 64)
MODEL = MODELS["llama-8b"]
COLD_BYTES = 150e6  # of weights and rows in one program: more than L2 keeps
LEAST_LAUNCHES, MOST_LAUNCHES = 8, 48  # in one program, which takes them all to compile
FEW_ROWS = 128  # of a step that decodes: works may be fewer than the device has CTAs
# Tried at every shape, so that one of them is the best single tiling; one with a deeper ring of B.
FIXED = tuple(
    fitted(config, max(RANKS))
    for config in (
        LoraGemmConfig(8),
        LoraGemmConfig(16),
        LoraGemmConfig(32),
        LoraGemmConfig(8, expand_stages=10),
    )
)


def shapes() -> tuple[Shape, ...]:
    """Return the sizes of the q and o maps, and of gate and up, at each number of rows."""
    m = MODEL
    outs = (m.q_heads * m.k_dim, m.intermediate)
    names = ("rows", "slots", "rank", "d_out", "d_in")
    sizes = itertools.product(ROWS, SLOTS, RANKS, outs, (m.hidden,))
    return tuple(dict(zip(names, some, strict=True)) for some in sizes)


def candidates(shape: Shape) -> Iterator[LoraGemmConfig]:
    """Yield the formula's choice, of few rows the same in fewer columns, and all of FIXED.

    Fewer columns make more works, which few rows may want; of many they took up to a third longer.
    """
    rank = shape["rank"]
    first = find_config(shape["rows"], shape["slots"], rank)
    near = (LoraGemmConfig(first.rows, 64, 2), LoraGemmConfig(first.rows, 128, 1))
    narrow = [fitted(c, rank) for c in near] if shape["rows"] <= FEW_ROWS else []
    yield from dict.fromkeys((first, *narrow, *FIXED))


def asked_for(shape: Shape) -> np.ndarray:
    """Return the slot of each row: i32 [rows]."""
    return popular("zipf", shape["rows"], shape["slots"], np.random.default_rng(0))


def sets(shape: Shape) -> int:
    """Return how many launches read and write more than L2 keeps, so that none finds its weights.

    Of the smallest maps for the fewest rows it would take hundreds.
    """
    wide, used = shape["d_in"] + shape["d_out"], len(np.unique(asked_for(shape)))
    one = 2.0 * wide * (shape["rank"] * used + shape["rows"])
    return min(MOST_LAUNCHES, int(np.ceil(COLD_BYTES / one)))


def launches(shape: Shape) -> int:
    """Return how many launches are in a program, so that the one schedule takes little of it."""
    return max(LEAST_LAUNCHES, sets(shape))


def arguments(shape: Shape) -> tuple:
    """Return rows of each launch, its pools, the table of the adapters, and each row's slot.

    Pools hold the adapters that are asked for, rounded up to a power of two of them.
    """
    slot = asked_for(shape)
    asked, rank = np.unique(slot), shape["rank"]
    index = np.minimum(np.searchsorted(asked, np.arange(shape["slots"])), len(asked) - 1)
    entries = np.zeros((shape["slots"], 5), np.int32)
    entries[:, 0] = entries[:, 1] = index * rank
    entries[:, 2] = rank
    table = (entries, np.ones(shape["slots"], np.float32), slot, np.zeros_like(slot))
    held = rank << (len(asked) - 1).bit_length()
    x, a_pool, b_pool = (
        jax.ShapeDtypeStruct(size, jnp.bfloat16)
        for size in (
            (shape["rows"], shape["d_in"]),
            (held, shape["d_in"]),
            (held, shape["d_out"]),
        )
    )
    return [x] * launches(shape), [(a_pool, b_pool)] * sets(shape), table


def program(shape: Shape, config: LoraGemmConfig) -> Callable:
    """Return the launches as a function of `arguments`; the schedule of the rows is made once."""

    def one(x, pools, table):
        # Written before it is added to, as a layer's is, and not one buffer for all launches.
        y = jnp.broadcast_to(x[:, :1], (shape["rows"], shape["d_out"]))
        batch = LoraBatch(x, *pools, *table, max_rank=shape["rank"])
        return pallas_gpu.lora_gemm(y, batch, config=config)

    def run(xs, pools, table):
        return [one(x, pools[i % len(pools)], table) for i, x in enumerate(xs)]

    return run


def tunable(op: str) -> Tunable:
    """Return the kernels as the search sees them."""
    return Tunable(op, shapes(), candidates, program, arguments, launches)
