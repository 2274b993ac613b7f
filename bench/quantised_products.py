"""Products of a few rows and of many with weights in each format on a CPU, beside bfloat16.

`taskset -c 1 python -m bench.quantised_products --out DIR` multiplies rows in bfloat16 by weights
of the shapes of a 125M model and of Llama-8B, in float32, bfloat16 and every quantised format, on
one core. The matrices of a case take turns, so that each comes from memory as in a decode step. A
time is processor time of one product, the median of turns that alternate between the formats; a
rate is bytes of weights and scales over that time. `float32` multiplies rows in float32.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.quantised_model import FORMATS
from lora_jax.ops.grouped_matmul import Weight, matmul
from lora_jax.ops.grouped_matmul.orders import for_kernels

# d_out, d_in: of the 125M model (bench.random_model), and of Llama-8B
SHAPES = ((768, 768), (2048, 768), (768, 2048), (4096, 4096))
ROWS = (1, 4, 8, 128)
PLAIN = ("float32", "bfloat16")
COLD_BYTES = 96 << 20  # of bfloat16 matrices of a case, more than most L3 caches hold
TURNS, TURN_SECONDS = 7, 0.05


def weights_of(name: str, shape: tuple[int, int], copies: int) -> list[Weight]:
    """Return so many random matrices [d_out, d_in] in a format."""
    rng = np.random.default_rng(0)
    plain = jnp.asarray(rng.standard_normal(shape, np.float32) * shape[1] ** -0.5)
    make = jax.jit(FORMATS[name] if name in FORMATS else lambda w: w + 0)
    plain = plain.astype(jnp.float32 if name == "float32" else jnp.bfloat16)
    return [for_kernels(jax.block_until_ready(make(plain))) for _ in range(copies)]


def weight_bytes(weight: Weight) -> int:
    """Return the bytes of a matrix: its values, scales and zeros."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weight))


def product_of(name: str, weights: list[Weight], rows: int) -> Callable[[int], None]:
    """Return a function that makes so many products, the matrices in turn."""
    dtype = jnp.float32 if name == "float32" else jnp.bfloat16
    x = np.random.default_rng(1).standard_normal((rows, weights[0].shape[-1]))
    x = jnp.asarray(x, dtype)
    multiply = jax.jit(lambda x, w: matmul(x, w, jnp.int32(rows)))
    place = 0

    def products(calls: int) -> None:
        nonlocal place
        for _ in range(calls):
            place = (place + 1) % len(weights)
            multiply(x, weights[place]).block_until_ready()

    return products


def seconds(products: Callable[[int], None], calls: int) -> float:
    """Return processor seconds of one product of some."""
    start = time.process_time()
    products(calls)
    return (time.process_time() - start) / calls


def measure(shape: tuple[int, int], all_rows: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    """Return a row for each number of rows and format of a shape."""
    d_out, d_in = shape
    copies = max(1, COLD_BYTES // (2 * d_out * d_in))
    weights = {name: weights_of(name, shape, copies) for name in (*PLAIN, *FORMATS)}
    results = []
    for rows in all_rows:
        products = {name: product_of(name, w, rows) for name, w in weights.items()}
        calls = {p: max(1, round(TURN_SECONDS / seconds(f, 3))) for p, f in products.items()}
        took: dict[str, list[float]] = {name: [] for name in products}
        for _ in range(turns):
            for name, function in products.items():
                took[name].append(seconds(function, calls[name]))
        medians = {name: statistics.median(values) for name, values in took.items()}
        for name, median in medians.items():
            size = weight_bytes(weights[name][0])
            row = {"d_out": d_out, "d_in": d_in, "rows": rows, "base": name, "bytes": size}
            row["us"] = round(median * 1e6, 1)
            row["gb_per_s"] = round(size / median / 1e9, 2)
            row["over_bfloat16"] = round(medians["bfloat16"] / median, 2)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            results.append(row)
    return results


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantised_products", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    march, about = os.environ.get("LORA_JAX_MARCH", "native"), record.about()
    products = [row for shape in SHAPES for row in measure(shape, tuple(args.rows), args.turns)]
    path = args.out / f"quantised_products_cpu_{march}_{about['date']}.json"
    record.write(path, about | {"march": march, "products": products})


if __name__ == "__main__":
    main()
