"""The programs of both sides, and what they work on."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bench.lora_server.plans import (
    ADAPTERS,
    ECHO,
    EXPERTS,
    LAYERS,
    LORA,
    MATRICES,
    RANK,
    SCALING,
    TOP_K,
    WIDTH,
    Plan,
)
from cuda_backend.lora_gemm import lora_pair, row_items
from lora_jax.ops.cases import popular
from serving.transport.base import AbstractClient, PushRows, push_rows
from serving.transport.device_server import DeviceServer
from serving.transport.shapes import DOWN, GATE_UP

ROUNDS = 2  # of both sites, in one program of a server
IDLE_US = 2000  # an empty round of a server
OneLayer = Callable[..., tuple]  # (x, gate, up, weights, layer, rows) -> (x, gate, up, statuses)


def random(seed: int, *kinds: tuple[tuple[int, ...], float]) -> tuple:
    """Return normal bfloat16 numbers for each (shape, scale), made on the device."""

    @jax.jit
    def make(key):
        keys = jax.random.split(key, len(kinds))
        return tuple(
            jax.random.normal(k, shape, jnp.bfloat16) * jnp.bfloat16(scale)
            for k, (shape, scale) in zip(keys, kinds, strict=True)
        )

    return make(jax.random.key(seed))


def make_pools() -> dict:
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
    found = random(1, *kinds)
    return {
        "entries": jnp.asarray(entries),
        "scaling": jnp.full((ADAPTERS,), SCALING, jnp.float32),
        **{name: found[2 * i : 2 * i + 2] for i, name in enumerate(MATRICES)},
    }


def make_weights() -> dict:
    """Return the base model's experts of one layer; every layer of a program uses them."""
    kinds = [((EXPERTS, *sizes), sizes[0] ** -0.5) for sizes in MATRICES.values()]
    return dict(zip(MATRICES, random(2, *kinds), strict=True))


def make_rows(plan: Plan, tokens: int, seed: int) -> list[PushRows]:
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
    return found


def server_program(server: DeviceServer) -> Callable:
    """Return (ticket, pools, mode) -> ticket: messages of both sites in turns, without the host."""
    max_rows = server.shapes.max_rows

    def take(ticket, site: int, names: Sequence[str], pools: dict, mode):
        message = server.accept(ticket, IDLE_US, site)
        slots = jnp.where(mode == LORA, message.adapters, -1)
        items = row_items(slots, message.experts, ADAPTERS)
        x = server.rows_of(message, site, max_rows)
        table = (pools["entries"], pools["scaling"], items, RANK)
        deltas = [
            lora_pair(jnp.zeros((max_rows, b.shape[1]), jnp.bfloat16), x, a, b, *table)
            for a, b in (pools[name] for name in names)
        ]
        return server.answer(message, mode >= ECHO, deltas, site).info

    @jax.jit
    def step(ticket, pools, mode):
        for _ in range(ROUNDS):
            ticket = take(ticket, GATE_UP, ("gate", "up"), pools, mode)
            ticket = take(ticket, DOWN, ("down",), pools, mode)
        return ticket

    return step


def experts_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the rows, equally many of each expert, times their experts' matrices."""
    groups = x.reshape(EXPERTS, -1, x.shape[1])
    return jnp.einsum("erd,edf->erf", groups, w).reshape(x.shape[0], w.shape[2])


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


def gate_deltas(client: AbstractClient) -> Callable:
    """Return a program (x, rows) -> (deltas of gate, status)."""

    @jax.jit
    def deltas(x, rows):
        zeros = jnp.zeros((x.shape[0], WIDTH), jnp.bfloat16)
        x = client.push(x, GATE_UP, 0, rows)
        (gate, _), status = client.wait_add((zeros, zeros), x, GATE_UP, rows)
        return gate, status

    return deltas
