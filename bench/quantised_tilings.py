"""Times of the Mosaic GPU kernel over quantised weights, by format, shape and tiling.

`python -m bench.quantised_tilings --format fp8 --out DIR` takes one format, so that several
processes can compile at once: a lock on a file keeps their timings apart. `bfloat16` are plain
weights in their own tiling. A floor is the bytes of weights of groups that have rows, scales, rows
and results over the bandwidth of a copy.
"""

import argparse
import fcntl
import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.kernels.timing import cold_sets, copy_bandwidth, repeats_for, time_us
from bench.quantised_model import FORMATS
from lora_jax.ops.cases import popular
from lora_jax.ops.grouped_matmul import pallas_gpu
from lora_jax.ops.grouped_matmul._gpu_tiles import GroupedMatmulConfig, with_stages
from lora_jax.ops.grouped_matmul._gpu_weights import form_of

PLAIN = "bfloat16"
# rows, groups, d_out, d_in, and tilings: warpgroups, rows, CTAs per SM
SHAPES = {
    "qwen3-30b-a3b gate, 64 tokens": ((512, 128, 768, 2048), [(4, 16, 1), (1, 16, 2), (3, 16, 1)]),
    "qwen3-30b-a3b down, 64 tokens": ((512, 128, 2048, 768), [(4, 16, 1), (1, 16, 2)]),
    "qwen3-30b-a3b gate, 1024 tokens": ((8192, 128, 768, 2048), [(2, 64, 1), (2, 128, 1)]),
    "mixtral-8x7b gate, 64 tokens": ((128, 8, 14336, 4096), [(4, 32, 1), (1, 32, 2)]),
    "llama-8b gate, 1 token": ((1, 1, 14336, 4096), [(4, 8, 1), (1, 8, 2)]),
    "llama-8b gate, 64 tokens": ((64, 1, 14336, 4096), [(2, 64, 1), (4, 64, 1)]),
    "llama-8b gate, 1024 tokens": ((1024, 1, 14336, 4096), [(2, 128, 1), (2, 192, 1)]),
}


@functools.cache
def drawer(name: str, shape: tuple[int, ...]):
    """Return a program that draws weights in a format: small scales, any codes."""
    like = jax.eval_shape(FORMATS.get(name, lambda w: w), jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    def one(leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.uint8:
            return jax.random.bits(key, leaf.shape, jnp.uint8)
        if leaf.dtype == jnp.float8_e4m3fn:
            bits = jax.random.bits(key, leaf.shape, jnp.uint8)
            bits = jnp.where(bits & 127 == 127, 0, bits)  # no NaN
            return jax.lax.bitcast_convert_type(bits, leaf.dtype)
        return (jax.random.uniform(key, leaf.shape) * shape[-1] ** -0.5 / 8).astype(leaf.dtype)

    leaves, tree = jax.tree.flatten(like)

    def draw(key: jax.Array) -> Any:
        keys = jax.random.split(key, len(leaves))
        drawn = [one(leaf, k) for leaf, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, drawn)

    return jax.jit(draw)


def make_weights(name: str, shape: tuple[int, ...], count: int) -> list[Any]:
    """Return random weights in a format."""
    return [drawer(name, shape)(jax.random.key(seed)) for seed in range(count)]


def measure(name: str, shape: tuple[int, ...], tiling: tuple | None, lock: Any, bandwidth: float):
    """Return the time of one product and its floor, in microseconds."""
    rows, groups, d_out, d_in = shape
    ids = popular("uniform", rows, groups, np.random.default_rng(0))
    sizes = np.bincount(ids, minlength=groups).astype(np.int32)
    (one,) = make_weights(name, (groups, d_out, d_in), 1)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(one)) * np.count_nonzero(sizes) / groups
    floor_us = (stored + 2 * rows * (d_in + d_out)) / bandwidth * 1e6
    config = None
    if tiling is not None:
        form, (wide, tile, ctas) = form_of("grouped_matmul", one), tiling
        config = GroupedMatmulConfig(64, wide, tile, 1, ctas, step=form.step, bits=form.bits)
        config = with_stages(config, 1)
    sets = cold_sets(stored, 1, 8)
    repeats = min(repeats_for(floor_us, sets), math.ceil(24 / sets))
    ws = [one, *make_weights(name, (groups, d_out, d_in), sets)[1:]]
    keys = jax.random.split(jax.random.key(1), repeats)
    xs = [jax.random.normal(key, (rows, d_in), jnp.bfloat16) for key in keys]
    multiply = functools.partial(pallas_gpu.grouped_matmul, config=config)

    def program(xs, ws, sizes):
        return [multiply(x, w, sizes, None) for x in xs for w in ws]

    compiled = jax.jit(program).lower(xs, ws, sizes).compile()
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        us = time_us(lambda _: compiled(xs, ws, sizes), [], repeats * sets)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
    return us, floor_us


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantised_tilings", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--format", choices=(PLAIN, *FORMATS), required=True)
    parser.add_argument(
        "--bandwidth", type=float, help="copy bandwidth in bytes per second (default: measured)"
    )
    args = parser.parse_args()
    record.need_gpu("bench.quantised_products measures a CPU.")
    about = record.about()
    bandwidth, results = args.bandwidth or copy_bandwidth(), []
    with Path(tempfile.gettempdir(), "quantised_tilings.lock").open("w") as lock:
        for what, (shape, tilings) in SHAPES.items():
            for tiling in [None] if args.format == PLAIN else tilings:
                us, floor_us = measure(args.format, shape, tiling, lock, bandwidth)
                results.append({"shape": what, "tiling": tiling, "us": us, "floor_us": floor_us})
                print(f"{args.format:8} {what:34} {tiling}: {us:.1f} us, floor {floor_us:.1f}")
    about["device"] = device = record.jax_device()
    result = about | {"format": args.format, "bandwidth": bandwidth, "times": results}
    name = f"quantised_tilings_{args.format}_{record.in_file_name(device)}.json"
    record.write(args.out / name, result)


if __name__ == "__main__":
    main()
