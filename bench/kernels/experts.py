"""The matrices of a decode layer's experts, as a step runs them: gate, up, activation and down.

Fused: one launch makes silu(gate) * up, adapters' deltas are addends of the products. Apart: the
form that it stands beside, three products, an activation and LoRA in place behind each product.
The rows' map and items are made once, outside the time.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import moe
from bench.kernels.timing import random, repeats_for, time_us
from cuda_backend import reroute
from cuda_backend.lora_gemm import lora_gemms
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.cases import MODELS
from lora_jax.ops.grouped_matmul import gated_matmul, grouped_matmul, silu_times

POINTS = (moe.Point("qwen3-30b-a3b", 64, 16, 16), moe.Point("mixtral-8x7b", 64, 16, 16))
WEIGHTS = {"gate": "wide", "up": "wide", "down": "back"}  # the pools that their adapters lie in


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's arrays: `set` as bench.kernels.moe makes them, and the base's matrices."""

    set: dict
    weights: dict[str, jax.Array]
    sizes: jax.Array
    items: AdapterItems


jax.tree_util.register_dataclass(Layer)


def make_layer(point: moe.Point, seed: int) -> Layer:
    """Return a layer of random weights with rank rows for every adapter."""
    m, arrays = MODELS[point.model], moe.make_set(point, seed)
    shapes = {"gate": (m.intermediate, m.hidden), "down": (m.hidden, m.intermediate)}
    shapes["up"] = shapes["gate"]
    weights = {
        name: random(50 * seed + i, (m.num_experts, *shapes[name]), shapes[name][1] ** -0.5)
        for i, name in enumerate(WEIGHTS)
    }
    adapters = moe.token_items(point, arrays)
    map = jax.jit(reroute.row_map, static_argnums=2)(
        arrays["chosen"], jnp.int32(point.tokens), m.num_experts, adapters
    )
    return Layer(arrays, weights, map.group_sizes, map.items)


def added(layer: Layer, point: moe.Point, ys: tuple, x: jax.Array, *names: str) -> tuple:
    """Return ys plus what the rows' adapters add at these maps of x."""
    s, pool = layer.set, WEIGHTS[names[0]]
    modules = [(y, s[f"{n}_entries"], s["scaling"]) for y, n in zip(ys, names, strict=True)]
    pools, owners = (s[f"{pool}_a"], s[f"{pool}_b"]), (s["row_to_slot"], s["row_to_expert"])
    return lora_gemms(modules, x, *pools, *owners, point.rank, layer.items)


def fused(layer: Layer, point: moe.Point, x: jax.Array, lora: bool) -> jax.Array:
    """Return the experts' output in two launches and those of the deltas."""
    w, sizes, hidden = layer.weights, layer.sizes, x.shape[1]
    width, addends, behind = w["gate"].shape[1], (), None
    if lora:
        zero = jnp.zeros((len(x), width), x.dtype)
        addends = added(layer, point, (zero, zero), x, "gate", "up")
    inner = gated_matmul(x, w["gate"], w["up"], sizes, *addends)
    if lora:
        (behind,) = added(layer, point, (jnp.zeros((len(x), hidden), x.dtype),), inner, "down")
    return grouped_matmul(inner, w["down"], sizes, None, behind)


def apart(layer: Layer, point: moe.Point, x: jax.Array, lora: bool) -> jax.Array:
    """Return the experts' output by three products, and what follows each."""
    w, sizes = layer.weights, layer.sizes
    ys = tuple(grouped_matmul(x, w[name], sizes) for name in ("gate", "up"))
    inner = silu_times(*(added(layer, point, ys, x, "gate", "up") if lora else ys))
    y = grouped_matmul(inner, w["down"], sizes)
    return added(layer, point, (y,), inner, "down")[0] if lora else y


def error(point: moe.Point, y: jax.Array, layer: Layer) -> float:
    """Return the largest relative error of some rows of the base's output against float64."""
    experts, worst = np.asarray(layer.set["row_to_expert"]), 0.0
    for row in np.linspace(0, len(experts) - 1, 5).astype(int):
        x = np.asarray(layer.set["wide_x"][row], np.float64)
        gate, up, down = (
            np.asarray(layer.weights[name][experts[row]], np.float64) for name in WEIGHTS
        )
        gate = gate @ x
        want = down @ (gate / (1 + np.exp(-gate)) * (up @ x))
        mine = np.asarray(y[row], np.float64)
        worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


def measure(
    point: moe.Point, layers: list[Layer], run: Callable, lora: bool, bandwidth: float
) -> dict:
    """Return one row of the table."""
    m, rows = MODELS[point.model], len(layers[0].set["row_to_expert"])
    used = len(set(np.asarray(layers[0].set["row_to_expert"]).tolist()))
    touched = 3.0 * used * m.hidden * m.intermediate + rows * 2 * m.hidden
    floor_us = 2 * touched / bandwidth * 1e6
    repeats = repeats_for(floor_us, len(layers))
    x = layers[0].set["wide_x"]
    base = jax.jit(lambda layer, x: run(layer, point, x, False))
    worst = error(point, base(layers[0], x), layers[0])
    xs = [x + jnp.bfloat16(i) for i in range(repeats)]

    @jax.jit
    def program(xs, layers):
        return [run(layer, point, x, lora) for x in xs for layer in layers]

    took = time_us(lambda _: program(xs, layers), [], repeats * len(layers))
    what = f"{point.adapters} adapters of rank {point.rank}" if lora else "base only"
    return {
        "name": f"experts of {point.model}, {point.tokens} tokens, {what}, {run.__name__}",
        "op": "experts",
        "rows": rows,
        "us": took,
        "floor_us": floor_us,  # of the base's bytes alone
        "peer_us": None,
        "bar_us": None,
        "error": worst,
    }


def rows(bandwidth: float) -> Iterator[dict]:
    """Yield the rows of the table."""
    for point in POINTS:
        layers = [make_layer(point, seed + 1) for seed in range(moe.SETS)]
        for lora in (False, True):
            for run in (apart, fused):
                yield measure(point, layers, run, lora, bandwidth)
