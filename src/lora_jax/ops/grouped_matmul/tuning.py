"""What the search for tilings needs to know of the Mosaic GPU kernel."""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.cases import MODELS, popular
from lora_jax.ops.grouped_matmul import _gpu_tiles, pallas_gpu
from lora_jax.ops.tuning import Shape, Tunable

CALLS = 20
TOKENS = (64, 4096, 256, 16, 1024, 1, 4)  # in order of what serving meets most
TUNED = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
MOST_REGISTERS = 192  # of a thread that hold sums


def shapes() -> tuple[Shape, ...]:
    """Return gate and down of each model's experts at each number of tokens."""
    found = []
    for tokens, name in itertools.product(TOKENS, TUNED):
        m = MODELS[name]
        for d_out, d_in in ((m.intermediate, m.hidden), (m.hidden, m.intermediate)):
            rows = tokens * m.top_k
            found.append({"rows": rows, "groups": m.num_experts, "d_out": d_out, "d_in": d_in})
    return tuple(found)


def candidates(shape: Shape) -> Iterator[_gpu_tiles.Config]:
    """Yield the formula's choice, then the tilings near it that fit shared memory and registers.

    Groups of few rows are bound by the weights' bytes: tiles of one to four times the mean rows.
    Longer ones are bound by the multipliers: the largest tiles.
    """
    first = _gpu_tiles.find_config(shape["rows"], shape["groups"], shape["d_out"])
    yield first
    mean = shape["rows"] / shape["groups"]
    if mean > _gpu_tiles.LONG_GROUP:
        tiles = itertools.product((64, 128), (2,), (64, 128, 192), (1,))
    else:
        near = [rows for rows in (8, 16, 32, 64) if mean <= rows <= max(16, 4 * mean)]
        tiles = itertools.product((64, 128), (1,), near, (1, 2))
    for columns, warpgroups, rows, ctas in tiles:
        config = _gpu_tiles.with_stages(
            _gpu_tiles.Config(columns, warpgroups, rows, 1, ctas), matrices=1
        )
        fits = config.stages >= 2 and columns * rows // 128 <= MOST_REGISTERS
        if config != first and fits:
            yield config


def prepare(shape: Shape):
    """Return run(config) over random weights and uniformly chosen groups."""
    rng = np.random.default_rng(0)
    ids = popular("uniform", shape["rows"], shape["groups"], rng)
    sizes = jnp.asarray(np.bincount(ids, minlength=shape["groups"]).astype(np.int32))
    size = (shape["groups"], shape["d_out"], shape["d_in"])
    w = jax.random.normal(jax.random.key(0), size, jnp.bfloat16)
    xs = [
        jax.random.normal(jax.random.key(i + 1), (shape["rows"], shape["d_in"]), jnp.bfloat16)
        for i in range(CALLS)
    ]

    def run(config):
        multiply = functools.partial(pallas_gpu.grouped_matmul, bias=None, config=config)
        program = jax.jit(lambda xs, w: [multiply(x, w, sizes) for x in xs])
        compiled = program.lower(xs, w).compile()
        return lambda: jax.block_until_ready(compiled(xs, w))

    return run


def tunable() -> Tunable:
    """Return the kernel as the search sees it."""
    return Tunable("grouped_matmul", shapes(), candidates, prepare, CALLS)
