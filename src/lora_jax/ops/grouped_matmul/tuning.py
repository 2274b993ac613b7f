"""Tuning interface of the Mosaic GPU kernel, plain and gated."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cases import MODELS, popular
from lora_jax.ops.grouped_matmul import _gpu_tiles, pallas_gpu
from lora_jax.ops.grouped_matmul._gpu_tiles import GroupedMatmulConfig
from lora_jax.ops.tuning_programs import Shape, Tunable

# Of a step, in order of what serving meets most; a shape serves those of half and twice its rows.
TOKENS = (128, 8, 512, 32, 4096, 64, 256)
EXPERT_TOKENS = (*TOKENS, 2048)
DENSE_TOKENS = (*TOKENS, 2048, 8192)
FULL_ROWS = 256  # from here on prompts, or rows that decode, fill the steps of a program
EXPERTS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
DENSE = "llama-8b"
MOST_REGISTERS = 192  # of a thread that hold sums
COLD_BYTES = 150e6  # of weights in one program: more than L2 keeps
FEW_ROWS = (8, 16, 32, 64)  # tiles of rows that keep two CTAs on an SM
DENSE_COLUMNS, DENSE_ROWS = (64, 128), (8, 16, 32, 64, 128)
MOST_DENSE_SUMS = 128  # of a thread
DENSE_STEPS = (64, 128, 256)  # of d_in in a stage
# Tried at every shape, so that one of them is the best single tiling: for one token, for a batch
# of them and for prompts.
FIXED = (
    GroupedMatmulConfig(64, 1, 16, 1, 2),
    GroupedMatmulConfig(64, 1, 64, 1, 2),
    GroupedMatmulConfig(128, 2, 128, 1, 1),
)


def shapes(op: str) -> tuple[Shape, ...]:
    """Return the sizes of the models' maps at each number of tokens.

    Gate and up are one launch of gated_matmul, of a dense layer too, which is one group; down and
    the other dense maps are grouped_matmul's.
    """
    listed = []
    for tokens in EXPERT_TOKENS:
        for name in EXPERTS:
            m = MODELS[name]
            sizes = {"rows": tokens * m.top_k, "groups": m.num_experts}
            wide, back = (m.intermediate, m.hidden), (m.hidden, m.intermediate)
            d_out, d_in = wide if op == "gated_matmul" else back
            listed.append({**sizes, "d_out": d_out, "d_in": d_in})
    gated = MODELS[DENSE].intermediate, MODELS[DENSE].hidden
    maps = [gated] if op == "gated_matmul" else _dense_maps()
    for tokens in DENSE_TOKENS:
        dense = {"rows": tokens, "groups": 1}
        listed += [{**dense, "d_out": d_out, "d_in": d_in} for d_out, d_in in maps]
    return tuple(listed)


def _dense_maps() -> list[tuple[int, int]]:
    """Return (d_out, d_in) of q and o, of gate and up, of down, and of o where it is narrow.

    Also of q, k and v in one launch, of gate and up, and of q, k and v where they are narrow.
    """
    m, narrow = MODELS[DENSE], MODELS[EXPERTS[0]]
    heads = m.q_heads * m.k_dim
    maps = [(heads, m.hidden), (m.intermediate, m.hidden), (m.hidden, m.intermediate)]
    joined = heads + 2 * m.kv_heads * m.k_dim
    maps += [(joined, m.hidden), (2 * m.intermediate, m.hidden)]
    heads, kv_heads = narrow.q_heads * narrow.k_dim, narrow.kv_heads * narrow.k_dim
    return [*maps, (narrow.hidden, heads), (heads + 2 * kv_heads, narrow.hidden)]


def candidates(shape: Shape, matrices: int) -> Iterator[GroupedMatmulConfig]:
    """Yield the formula's choice, then tilings near it that fit shared memory and registers.

    Groups of few rows are bound by the weights' bytes: tiles of one or two times the mean rows.
    Longer ones are bound by the multipliers: the largest tiles.
    """
    mean = shape["rows"] / shape["groups"]
    wide = 128 // matrices
    if shape["groups"] == 1 and mean <= 512:
        yield from _dense_candidates(shape, matrices)
        return
    near = [n for n in FEW_ROWS if mean <= n][:2]
    steps = (64, 128) if mean <= FEW_ROWS[-1] and shape["d_in"] % 128 == 0 else (64,)
    tilings = itertools.product((64, 128), near, steps)
    some = [GroupedMatmulConfig(c, 1, n, 1, 2, step=step) for c, n, step in tilings]
    if mean > _gpu_tiles.LONG_GROUP / 2:
        some += [GroupedMatmulConfig(wide, 2, n, 1, 1) for n in (64, 128)]
    if mean > 128:
        some += [GroupedMatmulConfig(wide, 2, n, 1, 1) for n in (144, 160, 176, 192)]
        some += [GroupedMatmulConfig(wide, 2, n, 1, 1, 32) for n in (128, 160, 192)]
    some += FIXED if matrices == 1 else [gated_as(c) for c in FIXED]
    first = _gpu_tiles.find_config(shape["rows"], shape["groups"], shape["d_out"], matrices)
    seen = set()
    for config in (first, *(_gpu_tiles.with_stages(c, matrices) for c in some)):
        sums = matrices * config.columns * config.rows // 128
        if config not in seen and config.stages >= 2 and sums <= MOST_REGISTERS:
            seen.add(config)
            yield config


def _dense_candidates(shape: Shape, matrices: int) -> Iterator[GroupedMatmulConfig]:
    """Yield the formula's choice for a dense map of few rows, then all tilings that may suit it.

    It has fewer tiles than there are SMs. Narrow ones employ more of them and read x more often;
    one CTA on an SM has more stages on their way. A warpgroup takes about 150 ns from one stage to
    the next, however few rows it multiplies: stages of more of d_in need fewer of those.
    """
    rows, d_out, d_in = shape["rows"], shape["d_out"], shape["d_in"]
    fixed = FIXED if matrices == 1 else [gated_as(c) for c in FIXED]
    first = [_gpu_tiles.find_config(rows, 1, d_out, matrices)]
    first += [_gpu_tiles.with_stages(c, matrices) for c in fixed]
    seen = set(first)
    yield from dict.fromkeys(first)
    groups = (1, 2) if rows > 128 else (1,)
    steps = DENSE_STEPS if rows <= 128 else DENSE_STEPS[:2]
    tilings = itertools.product(DENSE_COLUMNS, groups, DENSE_ROWS, (1, 2), steps)
    for columns, warpgroups, n, ctas, step in tilings:
        sums = matrices * columns * n // 128
        fits = d_out % (columns * warpgroups) == 0 and sums <= MOST_DENSE_SUMS
        if not fits or d_in % step or not rows / 8 <= n <= max(16, rows):
            continue
        plain = GroupedMatmulConfig(columns, warpgroups, n, 1, ctas, step=step)
        most = _gpu_tiles.with_stages(plain, matrices)
        # More on its way than the memory serves at once makes it slower.
        for config in (most, dataclasses.replace(most, stages=most.stages // 2)):
            if config.stages >= 3 and config not in seen:
                seen.add(config)
                yield config


def gated_as(config: GroupedMatmulConfig) -> GroupedMatmulConfig:
    """Return the tiling of two matrices that takes as many registers where one took many."""
    columns = config.columns if config.columns * config.rows <= 64 * 64 else config.columns // 2
    return GroupedMatmulConfig(columns, config.warpgroups, config.rows, 1, config.ctas)


def weight_sets(shape: Shape, matrices: int) -> int:
    """Return how many layers' weights a program reads, so that none is still in L2."""
    layer = 2.0 * matrices * min(shape["groups"], shape["rows"]) * shape["d_out"] * shape["d_in"]
    return max(1, int(np.ceil(COLD_BYTES / layer)))


def launches(shape: Shape, matrices: int) -> int:
    """Return how many launches are in a program: each reads its weights anew."""
    sets = weight_sets(shape, matrices)
    return max(2, sets + sets % 2)


def arguments(shape: Shape, matrices: int) -> tuple:
    """Return rows of each launch, the weights' sets and the rows of uniformly chosen groups.

    The launches of a dense map of few rows take turns with all rows and with half of them: steps of
    a program have from a quarter of its tokens to all.
    """
    ids = popular("uniform", shape["rows"], shape["groups"], np.random.default_rng(0))
    sizes = np.bincount(ids, minlength=shape["groups"]).astype(np.int32)
    w = jax.ShapeDtypeStruct((shape["groups"], shape["d_out"], shape["d_in"]), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((shape["rows"], shape["d_in"]), jnp.bfloat16)
    sets = weight_sets(shape, matrices)
    varies = shape["groups"] == 1 and shape["rows"] < FULL_ROWS
    turns = [sizes, sizes // 2] if varies else [sizes]
    return [x] * launches(shape, matrices), [[w] * matrices] * sets, turns


def program(shape: Shape, matrices: int, config: GroupedMatmulConfig) -> Callable:
    """Return the launches as a function of `arguments`."""
    del shape, matrices

    def one(x, sizes, w, up=None):
        if up is None:
            return pallas_gpu.grouped_matmul(x, w, sizes, None, config=config)
        return pallas_gpu.gated_matmul(x, w, up, sizes, config=config)

    def run(xs, sets, sizes):
        calls = enumerate(xs)
        return [one(x, sizes[i % len(sizes)], *sets[i % len(sets)]) for i, x in calls]

    return run


def tunable(op: str) -> Tunable:
    """Return the kernel as the search sees it."""
    matrices = 2 if op == "gated_matmul" else 1
    return Tunable(
        op,
        shapes(op),
        lambda shape: candidates(shape, matrices),
        lambda shape, config: program(shape, matrices, config),
        lambda shape: arguments(shape, matrices),
        lambda shape: launches(shape, matrices),
    )
