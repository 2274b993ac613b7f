"""A LoRA Server on several GPUs of one host: `python -m bench.lora_server --out DIR`.

Layers of Mixtral 8x7B's shape with adapters of rank 64 of all three matrices of its eight experts
(InfiniLoRA, Table 4): every (token, expert) row goes to the server over NVLink before the base
computation, and its deltas, in bfloat16, are added behind it. Both ends are programs of jax whose
exchanges are custom calls; one process drives all GPUs, with a thread for each, and one GPU is an
instance or a rank of the server.

Rows per layer, microseconds. `receive`: both requests of a layer and an empty answer. `send`: what
answers of the full size add to that. `lora`: what the adapters' products add to that. `exchange`:
all of it, one after the other. `base`: the experts' three matrices, as batched products of equal
groups. `overlap`: base and exchange as they are served. `exposed`: overlap less base.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend.lora_gemm import RowItems, lora_pair, row_items
from cuda_backend.peer import PeerDevice
from lora_jax.ops.cases import MODELS, popular
from lora_jax.placement.ep_pp import Placement
from lora_jax.placement.shape import AdapterShape
from serving.transport.base import AbstractClient, PushRows, push_rows
from serving.transport.device_memory import open_local_client
from serving.transport.device_server import DeviceServer
from serving.transport.shapes import DOWN, GATE_UP, moe_shapes

SHAPE = MODELS["mixtral-8x7b"]
Device = Any  # of jax; pyright takes jax.Device for a variable
EXPERTS, TOP_K, HIDDEN, WIDTH = SHAPE.num_experts, SHAPE.top_k, SHAPE.hidden, SHAPE.intermediate
RANK, ADAPTERS, SCALING = 64, 256, 0.5
LAYERS = 4  # of one program
ROUNDS = 4  # messages of one program of a server
IDLE_US = 2000  # an empty round of a server
LIMIT_S = 2.0  # for a wait: a hang ends, and is told by the statuses
BARRIER_S = 30.0
CALLS, SAMPLES = 6, 7
REFUSE, ECHO, LORA = 0, 1, 2  # what servers do


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement, and how many of its ranks and of its instances have a GPU here."""

    name: str
    ep: int
    pp: int
    servers: int
    instances: int = 1
    pull: bool = False

    @property
    def placement(self) -> Placement:
        return Placement(AdapterShape(ADAPTERS, LAYERS, EXPERTS, 1), ep=self.ep, pp=self.pp)

    @property
    def gpus(self) -> int:
        return self.servers + self.instances


PLANS = (
    Plan("EP1-PP1", 1, 1, 1),
    Plan("EP2-PP1", 2, 1, 2),
    Plan("EP1-PP2", 1, 2, 2),
    Plan("EP1-PP1, pull", 1, 1, 1, pull=True),
    Plan("EP2-PP1, pull", 2, 1, 2, pull=True),
    Plan("EP1-PP1, 2 instances", 1, 1, 1, 2),
    Plan("EP1-PP1, 3 instances", 1, 1, 1, 3),
    Plan("EP2-PP1, 2 instances", 2, 1, 2, 2),
    Plan("EP4-PP1", 4, 1, 4),
    Plan("EP2-PP2", 2, 2, 4),
    Plan("EP4-PP1, 3 of its ranks", 4, 1, 3),
)


def random(device: Device, seed: int, *kinds: tuple[tuple[int, ...], float]) -> tuple:
    """Return normal bfloat16 numbers on a device, for each (shape, scale)."""

    @jax.jit
    def make(key):
        keys = jax.random.split(key, len(kinds))
        return tuple(
            jax.random.normal(k, shape, jnp.bfloat16) * jnp.bfloat16(scale)
            for k, (shape, scale) in zip(keys, kinds, strict=True)
        )

    with jax.default_device(device):
        return jax.device_put(make(jax.random.key(seed)), device)  # and committed to it


MATRICES = {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}


def make_pools(device: Device) -> dict:
    """Return one layer's adapters, all experts: pools by matrix and the table of slots."""
    rows = ADAPTERS * EXPERTS * RANK
    entries = np.zeros((ADAPTERS, 5), np.int32)
    entries[:, 0] = entries[:, 1] = np.arange(ADAPTERS) * EXPERTS * RANK
    entries[:, 2:] = RANK
    kinds = [
        kind
        for d_in, d_out in MATRICES.values()
        for kind in (((rows, d_in), d_in**-0.5), ((rows, d_out), RANK**-0.5))
    ]
    found = random(device, 1, *kinds)
    return {
        "entries": jax.device_put(entries, device),
        "scaling": jax.device_put(np.full(ADAPTERS, SCALING, np.float32), device),
        **{name: found[2 * i : 2 * i + 2] for i, name in enumerate(MATRICES)},
    }


def make_weights(device: Device) -> dict:
    """Return the base model's experts of one layer; every layer of a program uses them."""
    kinds = [((EXPERTS, *sizes), sizes[0] ** -0.5) for sizes in MATRICES.values()]
    return dict(zip(MATRICES, random(device, 2, *kinds), strict=True))


def experts_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the rows, equally many of each expert, times their experts' matrices."""
    groups = x.reshape(EXPERTS, -1, x.shape[1])
    return jnp.einsum("erd,edf->erf", groups, w).reshape(x.shape[0], w.shape[2])


def server_program(server: DeviceServer, max_rows: int) -> Callable:
    """Return a program that takes and answers ROUNDS messages without the host."""

    def deltas(names: Sequence[str], x, items: RowItems, pools) -> tuple[jax.Array, ...]:
        table = (pools["entries"], pools["scaling"], items, RANK)
        return tuple(
            lora_pair(jnp.zeros((max_rows, b.shape[1]), jnp.bfloat16), x, a, b, *table)
            for a, b in (pools[name] for name in names)
        )

    @jax.jit
    def step(ticket, pools, mode):
        for _ in range(ROUNDS):
            message = server.accept(ticket, IDLE_US)
            slots = jnp.where(mode == LORA, message.adapters, -1)
            items = row_items(slots, message.experts, ADAPTERS)
            for site, names in ((GATE_UP, ("gate", "up")), (DOWN, ("down",))):
                # Without items the kernels of the other site end at once.
                num_items = jnp.where(message.site == site, items.num_items, 0)
                mine = dataclasses.replace(items, num_items=num_items)
                x = server.rows_of(message, site, max_rows)
                found = deltas(names, x, mine, pools)
                message = server.answer(message, mode != REFUSE, found, site)
            ticket = message.info
        return ticket

    return step


class RunningServer:
    """A rank at work on a thread of its own, until `close`."""

    def __init__(self, ends: PeerDevice, device: Device, pools: dict, max_rows: int, pull: bool):
        shapes = moe_shapes(LAYERS, max_rows, HIDDEN, WIDTH, "bfloat16", "bfloat16")
        self.server = DeviceServer(shapes, ends, pull=pull)
        self.mode = jax.device_put(jnp.int32(REFUSE), device)
        self._device, self.pools = device, pools
        self._step = server_program(self.server, max_rows)
        ticket = jax.device_put(jnp.zeros(8, jnp.int32), device)
        self._ticket = jax.block_until_ready(self._step(ticket, pools, self.mode))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def set_mode(self, mode: int) -> None:
        """Refuse, echo or compute from a program soon on."""
        self.mode = jax.device_put(jnp.int32(mode), self._device)
        time.sleep(4 * ROUNDS * IDLE_US * 1e-6)

    def close(self) -> None:
        """End the thread and give the slots back."""
        self._stopping.set()
        self._thread.join()
        self.server.close()

    def _run(self) -> None:
        under_way = [self._ticket]
        while not self._stopping.is_set():
            under_way.append(self._step(under_way[-1], self.pools, self.mode))
            if len(under_way) > 3:
                under_way.pop(0).block_until_ready()
        jax.block_until_ready(under_way)


def make_rows(plan: Plan, tokens: int, device: Device, seed: int) -> list[PushRows]:
    """Return where the rows of each layer go: top-2 of 8 experts, adapters by Zipf."""
    rng = np.random.default_rng(seed)
    owners = popular("zipf", tokens, ADAPTERS, rng)
    found = []
    for layer in range(LAYERS):
        chosen = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].reshape(-1)
        order = np.argsort(chosen, kind="stable")
        adapters = jnp.asarray(np.repeat(owners, TOP_K)[order].astype(np.int32))
        experts = jnp.asarray(chosen[order].astype(np.int32))
        numbers = (jnp.int32(len(order)), jnp.int32(0))
        rows = push_rows(plan.placement, layer, adapters, experts, *numbers)
        here = jnp.where(rows.row_to_server < plan.servers, rows.row_to_server, -1)
        found.append(dataclasses.replace(rows, row_to_server=here.astype(jnp.int32)))
    return jax.device_put(found, device)


OneLayer = Callable[..., tuple]  # (x, gate, up, weights, layer, rows) -> (x, gate, up, statuses)


def program(one_layer: OneLayer) -> Callable:
    """Return a program (state, weights, rows) -> state; state is (x, gate, up, worst status)."""

    def step(state, w, all_rows):
        x, gate, up, worst = state
        for layer, rows in enumerate(all_rows):
            x, gate, up, statuses = one_layer(x, gate, up, w, layer, rows)
            for status in statuses:
                worst = jnp.maximum(worst, jnp.max(status))
        return x, gate, up, worst

    return jax.jit(step, donate_argnums=0)


def base_layer(x, gate, up, w, layer, rows) -> tuple:
    """The base model alone."""
    del layer, rows
    gate, up = experts_matmul(x, w["gate"]), experts_matmul(x, w["up"])
    inner = jax.nn.silu(gate) * up
    return bounded(experts_matmul(inner, w["down"])), gate, up, ()


def exchange_layer(client: AbstractClient) -> OneLayer:
    """The two exchanges alone, one after the other."""

    def layer_step(x, gate, up, w, layer, rows):
        del w
        x = client.push(x, GATE_UP, layer, rows)
        (gate, up), first = client.wait_add((gate, up), x, GATE_UP, rows)
        inner = client.push(gate, DOWN, layer, rows)
        (x,), second = client.wait_add((x,), inner, DOWN, rows)
        return x, inner, up, (first, second)

    return layer_step


def overlap_layer(client: AbstractClient) -> OneLayer:
    """The base model, with the exchanges behind it."""

    def layer_step(x, gate, up, w, layer, rows):
        x = client.push(x, GATE_UP, layer, rows)
        gate, up = experts_matmul(x, w["gate"]), experts_matmul(x, w["up"])
        (gate, up), first = client.wait_add((gate, up), x, GATE_UP, rows)
        inner = client.push(jax.nn.silu(gate) * up, DOWN, layer, rows)
        y = experts_matmul(inner, w["down"])
        (x,), second = client.wait_add((y,), inner, DOWN, rows)
        return bounded(x), gate, up, (first, second)

    return layer_step


def bounded(x: jax.Array) -> jax.Array:
    """Return what a norm would: numbers of a size that no number of layers changes."""
    return jnp.clip(x, -2, 2)


class Instance:
    """One GPU with the base model, or with what of it the measurements need."""

    def __init__(self, device: Device, weights: dict, tokens: int):
        self.device, self.weights, self.num_rows = device, weights, tokens * TOP_K

    def state(self) -> tuple:
        """Return fresh activations."""
        widths = (HIDDEN, WIDTH, WIDTH)
        found = random(self.device, 3, *(((self.num_rows, w), 1.0) for w in widths))
        return (*found, jax.device_put(jnp.int32(0), self.device))

    def time_us(self, step: Callable, rows: list[PushRows], *, base: bool) -> tuple[float, int]:
        """Return microseconds of one layer, the median of some samples, and the worst status."""
        weights, state = self.weights if base else {}, self.state()
        for _ in range(2):
            state = step(state, weights, rows)
        jax.block_until_ready(state)
        samples = []
        for _ in range(SAMPLES):
            start = time.perf_counter()
            for _ in range(CALLS):
                state = step(state, weights, rows)
            jax.block_until_ready(state)
            samples.append((time.perf_counter() - start) * 1e6 / (CALLS * LAYERS))
        return statistics.median(samples), int(state[3])


def worst_error(client: AbstractClient, one: Instance, rows: PushRows, pools: dict) -> float:
    """Return the largest relative error of some rows' gate deltas against float64."""

    @jax.jit
    def deltas(x, rows):
        zeros = jnp.zeros((x.shape[0], WIDTH), jnp.bfloat16)
        x = client.push(x, GATE_UP, 0, rows)
        return client.wait_add((zeros, zeros), x, GATE_UP, rows)

    x = one.state()[0]
    (gate, _), status = deltas(x, rows)
    if np.asarray(status).any():
        raise RuntimeError(f"status {np.asarray(status).tolist()} of one exchange")
    sent = np.flatnonzero(np.asarray(rows.row_to_server) >= 0)
    some = sent[np.linspace(0, len(sent) - 1, 8).astype(int)]
    owners = np.asarray(rows.row_to_adapter)[some] * EXPERTS + np.asarray(rows.row_to_expert)[some]
    places = (owners[:, None] * RANK + np.arange(RANK)).reshape(-1)
    a, b = (np.asarray(p[places], np.float64).reshape(8, RANK, -1) for p in pools["gate"])
    h = np.einsum("td,trd->tr", np.asarray(x[some], np.float64), a)
    wanted = SCALING * np.einsum("tr,trd->td", h, b)
    wrong = np.linalg.norm(np.asarray(gate[some], np.float64) - wanted, axis=1)
    return float(np.max(wrong / np.linalg.norm(wanted, axis=1)))


class Bench:
    """The GPUs and what lies on them from one plan to the next."""

    def __init__(self, batches: Sequence[int]):
        self.devices = jax.devices()
        self.ends = [PeerDevice(number) for number in range(len(self.devices))]
        self.batches = batches
        self._pools: dict[int, dict] = {}
        self._weights: dict[int, dict] = {}
        self._base: dict[int, float] = {}

    def instance(self, gpu: int, tokens: int) -> Instance:
        """Return an instance on a GPU; its weights stay."""
        if gpu not in self._weights:
            self._weights[gpu] = make_weights(self.devices[gpu])
        return Instance(self.devices[gpu], self._weights[gpu], tokens)

    def server(self, gpu: int, max_rows: int, pull: bool) -> RunningServer:
        """Return a rank on a GPU, compiled; its adapters stay."""
        if gpu not in self._pools:
            self._pools[gpu] = make_pools(self.devices[gpu])
        where = self.ends[gpu], self.devices[gpu], self._pools[gpu]
        return RunningServer(*where, max_rows, pull)

    def base_us(self, tokens: int) -> float:
        """Return a layer of the base model alone."""
        if tokens not in self._base:
            one = self.instance(0, tokens)
            rows = make_rows(PLANS[0], tokens, one.device, 0)
            self._base[tokens] = one.time_us(program(base_layer), rows, base=True)[0]
        return self._base[tokens]

    def measure(self, plan: Plan, tokens: int) -> dict:
        """Return the plan's row: instances on the first GPUs, servers on those behind them."""
        gpus = range(plan.instances, plan.gpus)
        with ThreadPoolExecutor(len(gpus)) as pool:
            make = functools.partial(self.server, max_rows=tokens * TOP_K, pull=plan.pull)
            servers = list(pool.map(make, gpus))
        clients = [
            open_local_client([s.server for s in servers], self.ends[n])
            for n in range(plan.instances)
        ]
        for running in servers:
            running.start()
        try:
            return self._measure_connected(plan, tokens, clients, servers)
        finally:
            for client in clients:
                client.close()
            for running in servers:
                running.close()

    def _measure_connected(
        self,
        plan: Plan,
        tokens: int,
        clients: Sequence[AbstractClient],
        servers: Sequence[RunningServer],
    ) -> dict:
        for client in clients:
            client.set_limit(LIMIT_S)
        found: dict = {"plan": plan.name, "batch": tokens, "base": self.base_us(tokens)}
        one, exchange = self.instance(0, tokens), program(exchange_layer(clients[0]))
        rows = make_rows(plan, tokens, one.device, 0)
        if plan.instances == 1:
            for running in servers:
                running.set_mode(LORA)
            found["error"] = worst_error(clients[0], one, rows[0], servers[0].pools)
            parts = []
            for mode in (REFUSE, ECHO, LORA):
                for running in servers:
                    running.set_mode(mode)
                took, status = one.time_us(exchange, rows, base=False)
                wanted = 3 if mode == REFUSE else 0
                if status != wanted:
                    raise RuntimeError(f"{plan.name}: status {status}, not {wanted}")
                parts.append(took)
            found |= {"receive": parts[0], "send": parts[1] - parts[0]}
            found |= {"lora": parts[2] - parts[1], "exchange": parts[2]}
        for running in servers:
            running.set_mode(LORA)
        took = self._overlap(plan, tokens, clients)
        found |= {"overlap": took, "exposed": took - found["base"]}
        found["exposed_share"] = found["exposed"] / found["base"]
        return found

    def _overlap(self, plan: Plan, tokens: int, clients: Sequence[AbstractClient]) -> float:
        """Return a layer's time while all instances are at work; the slowest of them."""

        def run(number: int) -> float:
            one, overlap = self.instance(number, tokens), program(overlap_layer(clients[number]))
            rows = make_rows(plan, tokens, one.device, number)
            jax.block_until_ready(overlap(one.state(), one.weights, rows))
            together.wait(BARRIER_S)
            took, status = one.time_us(overlap, rows, base=True)
            if status:
                raise RuntimeError(f"{plan.name}: status {status} at instance {number}")
            return took

        together = threading.Barrier(len(clients))
        with ThreadPoolExecutor(len(clients)) as pool:
            return max(pool.map(run, range(len(clients))))


def rows_of_table(bench: Bench, plans: Sequence[Plan], end: float) -> Iterator[dict]:
    """Yield what was measured, until the time is over; what fails says so in its row."""
    for plan in plans:
        for tokens in bench.batches:
            name = {"plan": plan.name, "batch": tokens}
            if plan.gpus > len(bench.devices):
                yield name | {"left_out": f"needs {plan.gpus} GPUs"}
            elif time.monotonic() > end:
                yield name | {"left_out": "no time left"}
            else:
                start = time.monotonic()
                try:
                    found = bench.measure(plan, tokens)
                except (RuntimeError, ValueError, jax.errors.JaxRuntimeError) as error:
                    found = name | {"failed": str(error)[:300]}
                yield found | {"took_s": time.monotonic() - start}


def shown(row: dict) -> str:
    """Return one line of the table."""
    numbers = {k: v for k, v in row.items() if isinstance(v, float)}
    rest = {k: v for k, v in row.items() if k not in numbers}
    return f"{rest} " + " ".join(
        f"{k} {v:.3g}" if v < 2 else f"{k} {v:.0f}" for k, v in numbers.items()
    )


def main() -> None:
    """Measure every plan that fits the GPUs, and write one JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--plans", nargs="+", help="names; all of them by default")
    parser.add_argument("--seconds", type=float, default=600.0, help="no new row after that")
    options = parser.parse_args()
    by_name = {plan.name: plan for plan in PLANS}
    plans = [by_name[name] for name in options.plans or by_name]
    bench = Bench(options.batches)
    result = {
        "device": f"{len(bench.devices)} x {bench.devices[0].device_kind}",
        "shape": f"mixtral-8x7b, rank {RANK}, {ADAPTERS} adapters, Zipf 1.2, {LAYERS} layers",
        "processes": "one, a thread for each GPU",
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for row in rows_of_table(bench, plans, time.monotonic() + options.seconds):
        print(shown(row), flush=True)
        result["rows"].append(row)
        (options.out / "lora_server.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
