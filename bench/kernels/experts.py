"""The matrices of a decode layer's experts, as a step runs them: gate, up, activation and down.

Fused: one launch makes silu(gate) * up, adapters' deltas are addends of the products. Apart: the
form that it stands beside, three products, an activation and LoRA in place behind each product.
The rows' map and items are made once, outside the time.
"""

import dataclasses
import functools
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import moe
from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import Numbers
from bench.kernels.timing import repeats_for, time_us
from cuda_backend import reroute
from cuda_backend.lora_gemm import lora_gemms
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.grouped_matmul import gated_matmul, grouped_matmul, silu_times

SETS = 2  # of layers: each one's weights are more than L2 keeps
LAYERS = (moe.Point("qwen3-30b-a3b", 64, 16, 16), moe.Point("mixtral-8x7b", 64, 16, 16))
FORMS = ("apart", "fused")


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    layer: moe.Point
    form: str
    lora: bool

    @property
    def name(self) -> str:
        """The row's name in the table."""
        layer = self.layer
        adapters = f"{layer.adapters} adapters of rank {layer.rank}" if self.lora else "base only"
        return f"experts of {layer.model}, {layer.tokens} tokens, {adapters}, {self.form}"


POINTS = tuple(
    Point(layer, form, lora) for layer in LAYERS for lora in (False, True) for form in FORMS
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrays:
    """One layer on the device: `set` and `pools` as bench.kernels.moe makes them."""

    set: dict[str, jax.Array]
    pools: dict[str, jax.Array]
    weights: dict[str, jax.Array]
    sizes: jax.Array
    items: AdapterItems


class Layer:
    """One layer of random weights, with rank rows for every adapter."""

    def __init__(self, point: moe.Point, pools: moe.Pools, part: int):
        self.point, self.rows = point, moe.Layer(point, pools, part, SETS)
        m = point.shape
        shapes = {"gate": (m.intermediate, m.hidden), "up": (m.intermediate, m.hidden)}
        shapes["down"] = (m.hidden, m.intermediate)
        self.weights = {
            name: Numbers((m.num_experts, *shape), 50 * part + i, shape[1] ** -0.5)
            for i, (name, shape) in enumerate(shapes.items())
        }
        self._known: dict[tuple[int, bool], np.ndarray] = {}

    def product(self, name: str, row: int, x: np.ndarray, lora: bool) -> np.ndarray:
        """Return one row of a linear map in float64."""
        numbers, expert = self.weights[name], self.rows.row_to_expert[row]
        d_out = numbers.shape[1]
        y = numbers.rows(np.arange(expert * d_out, (expert + 1) * d_out)) @ x
        return y + self.rows.deltas(name, row, x) if lora else y

    def result(self, row: int, lora: bool) -> np.ndarray:
        """Return one row of the layer's output in float64; seconds at the first call."""
        if (row, lora) not in self._known:
            x = self.rows.xs["wide"].rows([row])[0]
            gate, up = (self.product(name, row, x, lora) for name in ("gate", "up"))
            inner = gate / (1 + np.exp(-gate)) * up
            self._known[row, lora] = self.product("down", row, inner, lora)
        return self._known[row, lora]

    @functools.cached_property
    def arrays(self) -> Arrays:
        """The layer on the device."""
        return self.placed(self.rows.pools.arrays)

    @property
    def shapes(self) -> Arrays:
        """Shapes of the arrays, to compile a program."""
        return jax.eval_shape(self.placed, self.rows.pools.shapes)

    def placed(self, pools: dict[str, jax.Array]) -> Arrays:
        """Return the layer's arrays around its pools."""
        weights = {name: numbers.on_device() for name, numbers in self.weights.items()}
        owners, chosen = (jnp.asarray(v) for v in (self.rows.owners, self.rows.chosen))
        items, sizes = _row_map(owners, chosen, self.point)
        return Arrays(self.rows.arrays(), pools, weights, sizes, items)


@functools.partial(jax.jit, static_argnums=2)
def _row_map(owners: jax.Array, chosen: jax.Array, point: moe.Point):
    """Return the items of the layer's rows and the experts' numbers of rows."""
    adapters, live = reroute.adapter_items(owners, point.adapters), jnp.int32(point.tokens)
    map = reroute.row_map(chosen, live, point.shape.num_experts, adapters)
    return map.items, map.group_sizes


def added(layer: Arrays, point: moe.Point, ys: tuple, x: jax.Array, *names: str) -> tuple:
    """Return ys, or nothing, plus what the rows' adapters add at these maps of x."""
    s, pool = layer.set, moe.POOL_OF[names[0]]
    modules = [(y, s[f"{n}_entries"], s["scaling"]) for y, n in zip(ys, names, strict=True)]
    pools = (layer.pools[f"{pool}_a"], layer.pools[f"{pool}_b"])
    owners = (s["row_to_slot"], s["row_to_expert"])
    return lora_gemms(modules, x, *pools, *owners, point.rank, layer.items)


def fused(layer: Arrays, point: moe.Point, x: jax.Array, lora: bool) -> jax.Array:
    """Return the experts' output in two launches and those of the deltas."""
    w, sizes = layer.weights, layer.sizes
    addends = added(layer, point, (None, None), x, "gate", "up") if lora else ()
    inner = gated_matmul(x, w["gate"], w["up"], sizes, *addends)
    behind = added(layer, point, (None,), inner, "down") if lora else ()
    return grouped_matmul(inner, w["down"], sizes, None, *behind)


def apart(layer: Arrays, point: moe.Point, x: jax.Array, lora: bool) -> jax.Array:
    """Return the experts' output by three products, and what follows each."""
    w, sizes = layer.weights, layer.sizes
    ys = tuple(grouped_matmul(x, w[name], sizes) for name in ("gate", "up"))
    inner = silu_times(*(added(layer, point, ys, x, "gate", "up") if lora else ys))
    y = grouped_matmul(inner, w["down"], sizes)
    return added(layer, point, (y,), inner, "down")[0] if lora else y


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point with its layers and program."""

    point: Point
    layers: list[Layer]
    floor_us: float
    repeats: int
    program: Future

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        program, arrays = self.program.result(), [layer.arrays for layer in self.layers]
        x = arrays[0].set["wide_x"]
        xs = [x + jnp.bfloat16(i) for i in range(self.repeats)]
        took = time_us(lambda _: program(xs, arrays), [], self.repeats * len(arrays))
        return {
            "name": self.point.name,
            "op": "experts",
            "rows": self.point.layer.rows,
            "us": took,
            "floor_us": self.floor_us,  # of the base's bytes alone
            "peer_us": None,
            "bar_us": None,
            "error": self.error(np.asarray(program(xs, arrays)[0], np.float64)),
        }

    def error(self, y: np.ndarray) -> float:
        """Return the largest relative error of some rows of layer 0 against float64."""
        layer, worst = self.layers[0], 0.0
        for row in layer.rows.checked_rows()[::2]:
            want = layer.result(row, self.point.lora)
            worst = max(worst, float(np.linalg.norm(y[row] - want) / np.linalg.norm(want)))
        return worst


def compiled(point: Point, layers: list[Layer], machine: Machine) -> Measured:
    """Return the point with its program of many layers."""
    m, some = point.layer.shape, layers[0]
    used = len(set(some.rows.row_to_expert.tolist()))
    touched = 3.0 * used * m.hidden * m.intermediate + point.layer.rows * 2 * m.hidden
    floor_us = 2 * touched / machine.bandwidth * 1e6
    repeats, form = repeats_for(floor_us, len(layers)), {"apart": apart, "fused": fused}[point.form]

    def program(xs, layers):
        return [form(layer, point.layer, x, point.lora) for x in xs for layer in layers]

    x = jax.ShapeDtypeStruct(some.rows.xs["wide"].shape, jnp.bfloat16)
    shapes = ([x] * repeats, [layer.shapes for layer in layers])
    return Measured(point, layers, floor_us, repeats, machine.compile(program, *shapes))


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    results, known = [], {}
    for point in points:
        layer = point.layer
        if layer not in known:
            pools = moe.Pools(layer.model, layer.rank, SETS * layer.adapters)
            known[layer] = [Layer(layer, pools, part) for part in range(SETS)]
        done = compiled(point, known[layer], machine)
        results.append(Job(point.name, (done.program,), done.measure))
    return results
