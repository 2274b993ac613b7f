"""NF4 products on a CPU beside those of the bitsandbytes CPU library, in one process.

`python -m bench.nf4_cpu --out DIR` needs torch and bitsandbytes (`pip install bitsandbytes
--no-deps --target FOLDER`, and FOLDER on PYTHONPATH). Both multiply the same codes by rows in
bfloat16, on one core. Turns of one alternate with turns of the other; a time is processor time,
which other programs change little. On a CPU with AVX512-BF16 the library multiplies repacked codes;
on others it dequantises the matrix and calls torch. Ours has the bits of the plain weights; the
library's repacked product rounds the scales of blocks to bfloat16.
"""

import argparse
import importlib
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
from lora_jax.ops.grouped_matmul import CodedWeight, matmul
from lora_jax.ops.grouped_matmul.orders import for_kernels

# d_out, d_in: of the 125M model (bench.quantised), and of Llama-8B
SHAPES = ((768, 768), (2048, 768), (768, 2048), (4096, 4096), (14336, 4096))
ROWS = (1, 8)
BLOCK = 64
TURNS, TURN_SECONDS = 9, 0.05


def flipped(codes: np.ndarray) -> np.ndarray:
    """Return bytes of two codes as bitsandbytes stores them: the earlier one in the high half."""
    return codes << 4 | codes >> 4


def peer_product(w: CodedWeight, x: np.ndarray) -> Callable[[], np.ndarray]:
    """Return the library's product of rows and a weight, packed as it wants it on this CPU."""
    import torch

    bnb = importlib.import_module("bitsandbytes.functional")

    torch.set_num_threads(1)
    d_out, d_in = w.shape
    code = bnb.get_4bit_type("nf4", device="cpu")
    absmax = torch.from_numpy(np.asarray(w.scales, np.float32).reshape(-1))
    state = bnb.QuantState(
        absmax,
        torch.Size((d_out, d_in)),
        code,
        BLOCK,
        "nf4",
        torch.bfloat16,
    )
    stored = torch.from_numpy(flipped(np.asarray(w.codes)).reshape(-1, 1))
    if bnb.has_avx512bf16():
        stored, state = bnb._convert_weight_packed_for_cpu(stored, state)
    rows = torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    matmul_4bit = importlib.import_module("bitsandbytes").matmul_4bit
    return lambda: matmul_4bit(rows, stored, state).float().numpy()


def own_product(w: CodedWeight, x: np.ndarray) -> Callable[[], np.ndarray]:
    """Return our product of the same."""
    multiply = jax.jit(lambda x, w: matmul(x, w, jnp.int32(len(x))))
    rows, ordered = jnp.asarray(x, jnp.bfloat16), for_kernels(w)
    return lambda: np.asarray(multiply(rows, ordered), np.float32)


def seconds(product: Callable[[], Any], calls: int) -> float:
    """Return processor seconds of one of some calls."""
    start = time.process_time()
    for _ in range(calls):
        product()
    return (time.process_time() - start) / calls


def measure(d_out: int, d_in: int, rows: int) -> dict[str, Any]:
    """Return both times of one shape, in microseconds, and how far the results are apart."""
    rng = np.random.default_rng(0)
    plain = jnp.asarray(rng.standard_normal((d_out, d_in)) * d_in**-0.5, jnp.bfloat16)
    w, x = jax.jit(FORMATS["nf4"])(plain), rng.standard_normal((rows, d_in)).astype(np.float32)
    ours, peer = own_product(w, x), peer_product(w, x)
    got, want = ours(), peer()
    apart = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    assert apart < 0.02, f"not the same product: {apart}"
    calls = max(1, round(TURN_SECONDS / seconds(ours, 3)))
    turns = [(seconds(ours, calls), seconds(peer, calls)) for _ in range(TURNS)]
    mine, theirs = (statistics.median(side) * 1e6 for side in zip(*turns, strict=True))
    ratio = statistics.median(b / a for a, b in turns)
    shape = {"d_out": d_out, "d_in": d_in, "rows": rows}
    return shape | {"us": mine, "peer_us": theirs, "rate_over_peer": ratio, "apart": apart}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.nf4_cpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    args = parser.parse_args()
    about = record.about()
    results = [measure(*shape, rows) for shape in SHAPES for rows in ROWS]
    for row in results:
        print(
            f"{row['d_out']:6} x {row['d_in']:5}, {row['rows']} rows: {row['us']:8.1f} us, "
            f"bitsandbytes {row['peer_us']:8.1f}, {row['rate_over_peer']:.2f} of its rate"
        )
    march = os.environ.get("LORA_JAX_MARCH", "native")
    result = about | {"march": march, "products": results}
    record.write(args.out / f"nf4_cpu_{about['date']}.json", result)


if __name__ == "__main__":
    main()
