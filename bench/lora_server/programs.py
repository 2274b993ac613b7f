"""The programs of both sides, and what they work on."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench.lora_server.plans import LORA, REFUSE, SITES, Case, MeasuredPlan
from lora_jax.ops.cases import popular
from lora_jax.ops.lora_gemm import lora_gemms
from lora_jax.typing import Array, Int
from serving.lora_server.transport.base import AbstractClient, PushRows, push_rows
from serving.lora_server.transport.device_server import MOST_MESSAGES, DeviceServer, Verdict
from serving.lora_server.transport.shapes import DOWN, GATE_UP

ROUNDS = 4  # of both sites, in one program of a server
IDLE_US = 1000  # that it waits for each
MATRICES = ("gate", "up", "down")
SCALING = 2.0**-6  # rows that take part again and again stay of a size
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
OneLayer = Callable[..., tuple]  # (x, gate, up, weights, layer, rows) -> (x, gate, up, statuses)


def numbers(seed: int, rows: Int[Array, "rows"], width: int, scale: float, dtype: str) -> Array:
    """Return [rows, width] of numbers of that deviation that follow from seed, row and column."""
    shape, word = (rows.shape[0], width), jnp.uint32
    column = jax.lax.broadcasted_iota(word, shape, 1)
    mixed = rows.astype(word)[:, None] * word(0x9E3779B1) ^ column * word(0x85EBCA77)
    mixed = mixed ^ word(seed * 0x27D4EB2F % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ mixed >> word(shift)) * word(factor)
    even = (mixed >> word(8)).astype(jnp.float32) * jnp.float32(2.0**-24) - jnp.float32(0.5)
    return (even * jnp.float32(12**0.5 * scale)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def matrix(seed: int, rows: int, width: int, scale: float, dtype: str) -> Array:
    """Return `numbers` of the rows from 0 on."""
    return numbers(seed, jnp.arange(rows), width, scale, dtype)


def pool_of(case: Case, width: int) -> dict:
    """Return what `numbers` takes of the pool of rank rows of a width, but for the rows."""
    narrow = width == case.hidden
    scale = case.hidden**-0.5 if narrow else case.rank**-0.5
    return {"seed": 10 + narrow, "width": width, "scale": scale, "dtype": case.dtype}


def make_pools(case: Case) -> dict:
    """Return one layer's adapters: rank rows by width, and the table of slots of each matrix.

    In either pool stand the rows of gate, then those of up, then those of down.
    """
    rows = case.adapters * case.experts * case.rank
    first = np.arange(3 * case.adapters, dtype=np.int32) * case.experts * case.rank
    entries = np.full((3, case.adapters, 5), case.rank, np.int32)
    entries[..., :2] = first.reshape(3, -1, 1)
    results: dict = {
        "entries": jnp.asarray(entries),
        "scaling": jnp.full((3, case.adapters), SCALING, jnp.float32),
    }
    for width in (case.hidden, case.width):
        pool = pool_of(case, width)
        results[str(width)] = matrix(pool["seed"], 3 * rows, width, pool["scale"], case.dtype)
    return results


def make_weights(case: Case) -> dict:
    """Return the base model's experts of one layer; every layer of a program uses them."""
    results = {}
    for seed, name in enumerate(MATRICES):
        d_in, d_out = case.sizes(name)
        flat = matrix(20 + seed, case.experts * d_in, d_out, d_in**-0.5, case.dtype)
        results[name] = flat.reshape(case.experts, d_in, d_out)
    return results


def make_rows(
    case: Case, plan: MeasuredPlan, tokens: int, seed: Sequence[int]
) -> dict[int, PushRows]:
    """Return where the rows of layers go: the best experts at random, adapters by Zipf."""
    rng, placement = np.random.default_rng(seed), plan.placement(case)
    owners = popular("zipf", tokens, case.adapters, rng)
    results = {}
    for layer in plan.layers(case):
        chosen = np.argsort(rng.random((tokens, case.experts)), axis=1)[:, : case.top_k]
        chosen = chosen.reshape(-1)
        order = np.argsort(chosen, kind="stable")
        adapters = jnp.asarray(np.repeat(owners, case.top_k)[order].astype(np.int32))
        experts = jnp.asarray(chosen[order].astype(np.int32))
        sizes = (jnp.int32(len(order)), jnp.int32(0))
        rows = push_rows(placement, layer, adapters, experts, *sizes)
        here = jnp.where(rows.row_to_server < plan.servers, rows.row_to_server, -1)
        results[layer] = dataclasses.replace(rows, row_to_server=here.astype(jnp.int32))
    return results


def orders(mode: int) -> dict:
    """Return what a server's program is told of a mode, as data: a constant would be a launch."""
    verdict = Verdict.REFUSE if mode == REFUSE else Verdict.ANSWER
    return {
        "idle_us": np.int32(IDLE_US),
        "computes": np.bool_(mode == LORA),
        "verdicts": np.full(MOST_MESSAGES, verdict, np.int32),
    }


def server_program(case: Case, server: DeviceServer, options: dict[str, str] | None) -> Callable:
    """Return (ticket, pools, orders) -> ticket: messages of both sites in turn, without the host.

    Those of one site that wait are taken together. The ticket is donated: a graph whose addresses
    change is written anew, node by node. A program has no branches: those of a CUDA graph take
    longer than kernels that find nothing to do. So what a mode leaves out still costs its launches.
    """

    def take(ticket, site, pools, orders):
        messages, x = server.take(ticket, orders["idle_us"], site)
        names = SITES[site]
        d_in, d_out = case.sizes(names[0])
        deltas = lora_gemms(
            [None] * len(names),
            x,
            pools[str(d_in)],
            pools[str(d_out)],
            pools["entries"],
            pools["scaling"],
            [MATRICES.index(name) for name in names],
            jnp.where(orders["computes"], messages.adapters, -1),
            messages.experts,
            max_rank=case.rank,
        )
        deltas = [delta.astype(server.shapes.result_dtype) for delta in deltas]
        return server.answer(messages, orders["verdicts"], deltas, site).info

    @functools.partial(jax.jit, compiler_options=options, donate_argnums=0)
    def step(ticket, pools, orders):
        for _ in range(ROUNDS):
            for site in SITES:
                ticket = take(ticket, site, pools, orders)
        return ticket

    return step


def experts_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the rows, equally many of each expert, times their experts' matrices."""
    groups = x.reshape(w.shape[0], -1, x.shape[1])
    return jnp.einsum("erd,edf->erf", groups, w).reshape(x.shape[0], w.shape[2])


def program(one_layer: OneLayer) -> Callable:
    """Return a program (state, weights, rows) -> state; state is (x, gate, up, worst statuses)."""

    def step(state, w, all_rows):
        x, gate, up, worst = state
        seen = []  # looked at together, element by element: a look at each would be a launch
        for layer, rows in all_rows.items():
            x, gate, up, statuses = one_layer(x, gate, up, w, layer, rows)
            seen += statuses
        return x, gate, up, jnp.maximum(worst, jnp.concatenate(seen)) if seen else worst

    return jax.jit(step, donate_argnums=0)


def base_layer(x, gate, up, w, layer, rows) -> tuple:
    """The base model alone."""
    del layer, rows
    inner = jax.nn.silu(experts_matmul(x, w["gate"])) * experts_matmul(x, w["up"])
    return bounded(experts_matmul(inner, w["down"])), gate, up, ()


def exchange_layer(clients: Sequence[AbstractClient]) -> OneLayer:
    """The two exchanges alone, one after the other; those of all clients at the same moment."""

    def layer_step(x, gate, up, w, layer, rows):
        del w
        for client, own in zip(clients, rows, strict=True):
            x = client.push(x, GATE_UP, layer, own)
        (gate, up), first = _wait_all(clients, (gate, up), x, GATE_UP, rows)
        for client, own in zip(clients, rows, strict=True):
            gate = client.push(gate, DOWN, layer, own)
        (x,), second = _wait_all(clients, (x,), gate, DOWN, rows)
        return x, gate, up, first + second

    return layer_step


def overlap_layer(clients: Sequence[AbstractClient]) -> OneLayer:
    """The base model, with the exchanges of each client behind it.

    Their answers are all added to the same y, so that each waits before any pushes again.
    """

    def layer_step(x, gate, up, w, layer, rows):
        for client, own in zip(clients, rows, strict=True):
            x = client.push(x, GATE_UP, layer, own)
        y = experts_matmul(x, w["gate"]), experts_matmul(x, w["up"])
        y, first = _wait_all(clients, y, x, GATE_UP, rows)
        inner = jax.nn.silu(y[0]) * y[1]
        for client, own in zip(clients, rows, strict=True):
            inner = client.push(inner, DOWN, layer, own)
        y = (experts_matmul(inner, w["down"]),)
        y, second = _wait_all(clients, y, inner, DOWN, rows)
        return bounded(y[0]), gate, up, first + second

    return layer_step


def _wait_all(
    clients: Sequence[AbstractClient],
    ys: tuple,
    keep: jax.Array,
    site: int,
    rows: Sequence[PushRows],
) -> tuple[tuple, list[jax.Array]]:
    """Return ys with every client's answer added, and the statuses."""
    statuses = []
    for client, own in zip(clients, rows, strict=True):
        ys, status = client.wait_add(ys, keep, site, own)
        statuses.append(status)
    return ys, statuses


def bounded(x: jax.Array) -> jax.Array:
    """Return what a norm would: numbers of a size that no number of layers changes."""
    return jnp.clip(x, -2, 2)


def gate_deltas(case: Case, client: AbstractClient) -> Callable:
    """Return a program (x, rows) -> (deltas of gate, status)."""

    @jax.jit
    def deltas(x, rows):
        zeros = jnp.zeros((x.shape[0], case.width), x.dtype)
        x = client.push(x, GATE_UP, 0, rows)
        (gate, _), status = client.wait_add((zeros, zeros), x, GATE_UP, rows)
        return gate, status

    return deltas
