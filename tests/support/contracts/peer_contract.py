"""Contract of the GPU transport, emulated or real, beyond that of every transport."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.transport_cases import (
    EXPERTS,
    LAYERS,
    LONG,
    MAX_ROWS,
    batch,
    bits,
    connected,
    exchange,
    open_client,
    open_servers,
    terms_of,
    want_ys,
)
from support.contracts.transport_contract import TransportContract, plan_cases
from support.doubles.peer_double import OneProcess, ServerProcess, Sockets
from support.waiting import wait_until

from serving.lora_server.transport import device_memory
from serving.lora_server.transport.base import Status
from serving.lora_server.transport.device_server import no_ticket
from serving.lora_server.transport.shapes import DOWN, GATE_UP

REFUSED_LAYER = LAYERS - 1
_IDLE_US = 20_000  # of a round without a message


def traced_deltas(shapes, site, row_to_layer, x, adapters, experts):
    """What transport_cases.deltas_of computes, as a program."""
    wide = x.astype(jnp.float32)
    per_row = (
        adapters.astype(jnp.float32) * jnp.float32(0.5)
        + experts.astype(jnp.float32) * jnp.float32(0.25)
        + row_to_layer.astype(jnp.float32)
    )[:, None]
    return tuple(
        (jnp.resize(wide.T, (d_out, len(wide))).T * jnp.float32(k + 1) + per_row).astype(
            shapes.result_dtype
        )
        for k, d_out in enumerate(shapes.sites[site].d_outs)
    )


def server_program(server):
    """Return a program that takes and answers each site's twice; those of one layer are refused."""
    shapes = server.shapes

    @jax.jit
    def program(ticket):
        for site in (GATE_UP, DOWN) * 2:
            messages, x = server.take(ticket, _IDLE_US, site)
            ok = messages.layers != REFUSED_LAYER
            row_to_layer = messages.layers[messages.row_to_message]
            owners = (messages.adapters, messages.experts)
            deltas = traced_deltas(shapes, site, row_to_layer, x, *owners)
            ticket = server.answer(messages, ok, deltas, site).info
        return ticket

    return program


@contextlib.contextmanager
def serving_on(server, device):
    """Run a server's programs on a thread, and end it."""
    program, stopping = server_program(server), threading.Event()
    ticket = jax.block_until_ready(program(jax.device_put(no_ticket(), device)))

    def run():
        found = ticket
        while not stopping.is_set():
            found = jax.block_until_ready(program(found))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(LONG)
        assert not thread.is_alive()


class PeerContract(TransportContract):
    transport: Sockets  # type: ignore[assignment]
    waits_beside = 1

    # Emulated devices wait in loops: four servers cost seconds, and every transport routes alike.
    @pytest.mark.parametrize(("plan", "num_rows"), plan_cases((0, 1), (2, 3)))
    def test_every_plan_brings_the_same_rows(self, tmp_path, plan, num_rows):
        super().test_every_plan_brings_the_same_rows(tmp_path, plan, num_rows)

    def test_a_program_serves_without_the_host(self, tmp_path):
        terms = terms_of("bfloat16", ep=2)
        rng = np.random.default_rng(0)
        with (
            open_servers(self.transport, terms, tmp_path) as servers,
            contextlib.ExitStack() as open_,
        ):
            for server in servers[:2]:
                open_.enter_context(serving_on(server, jax.devices()[1]))
            client = open_client(self.transport, terms, servers, tmp_path)
            open_.callback(client.close)
            for site in (GATE_UP, DOWN):
                for layer in range(LAYERS):
                    x, ys, rows = batch(terms, rng, MAX_ROWS, site, layer)
                    got, status = exchange(client, site, layer)(x, ys, rows)
                    wanted = want_ys(terms.shapes, site, layer, x, ys, rows)
                    if layer == REFUSED_LAYER:
                        assert set(np.asarray(status).tolist()) == {Status.REFUSED}
                        wanted = ys
                    assert [bits(y) for y in got] == [bits(y) for y in wanted]
            assert client.lost() == ()

    def test_a_layer_may_be_computed_by_the_program(self, tmp_path):
        terms = terms_of(ep=1)
        with connected(self.transport, terms, tmp_path) as (client, _):

            @jax.jit
            def step(before, x, ys, rows):
                x = client.push(x, GATE_UP, before + 1, rows)
                return client.wait_add(ys, x, GATE_UP, rows)

            x, ys, rows = batch(terms, np.random.default_rng(0), MAX_ROWS, base_share=0.2)
            for layer in range(LAYERS):
                got, status = step(jnp.int32(layer - 1), x, ys, rows)
                wanted = want_ys(terms.shapes, GATE_UP, layer, x, ys, rows)
                assert np.asarray(status).tolist() == [Status.ARRIVED]
                assert [bits(y) for y in got] == [bits(y) for y in wanted]

    def test_a_killed_server_ends_the_wait_and_its_successor_joins(self, tmp_path):
        if isinstance(self.transport, OneProcess):
            return
        gpus, path, terms = self.transport.gpus, tmp_path / "rank-0.sock", terms_of(ep=1)
        process = ServerProcess(gpus, path, hold=2)
        client = device_memory.open_client([path], terms, gpus.device(0))
        client.set_limit(1000.0)  # so that nothing but the death itself ends a wait
        x, ys, rows = batch(terms, np.random.default_rng(0), MAX_ROWS, base_share=0.2)
        wanted = [bits(y) for y in want_ys(terms.shapes, GATE_UP, 1, x, ys, rows)]
        step, results = exchange(client), []
        got, status = step(x, ys, rows)
        assert ([bits(y) for y in got], np.asarray(status).tolist()) == (wanted, [Status.ARRIVED])
        waiter = threading.Thread(
            target=lambda: results.append(jax.block_until_ready(step(x, ys, rows)))
        )
        waiter.start()
        process.expect("held")
        process.kill()
        waiter.join(LONG)
        got, status = results[0]
        assert np.asarray(status).tolist() == [Status.ABORTED]
        assert [bits(y) for y in got] == [bits(y) for y in ys]
        assert client.lost() == client.rejoin() == (0,)
        successor = ServerProcess(gpus, path, hold=0)
        wait_until(lambda: client.rejoin() == ())
        got, status = step(x, ys, rows)
        assert ([bits(y) for y in got], np.asarray(status).tolist()) == (wanted, [Status.ARRIVED])
        successor.kill()
        wait_until(lambda: client.lost() == (0,))
        client.close()

    def test_rows_of_no_server_harm_nothing(self, tmp_path):
        terms = terms_of(ep=1)
        with open_servers(self.transport, terms, tmp_path) as servers:
            client = open_client(self.transport, terms, servers, tmp_path)
            x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=1.0)
            rows = jax.tree.map(jnp.asarray, rows)
            lost = rows.row_to_server.at[3].set(EXPERTS)
            rows = type(rows)(rows.num_rows, rows.table_version, lost, *_owners(rows))
            got, status = exchange(client)(x, ys, rows)
            assert np.asarray(status).tolist() == [Status.ABORTED]
            assert [bits(y) for y in got] == [bits(y) for y in ys]
            assert client.stats().pushes == 0
            client.close()


def _owners(rows):
    return rows.row_to_adapter, rows.row_to_expert
