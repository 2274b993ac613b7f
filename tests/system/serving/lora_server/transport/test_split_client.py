"""Clients of several devices as one: each device of a program exchanges its own rows."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.cases.transport_cases import (
    batch,
    bits,
    exact_deltas,
    open_client,
    open_servers,
    serving,
    terms_of,
    want_ys,
)

from serving.lora_server.transport.shapes import GATE_UP
from serving.lora_server.transport.split_client import SplitClient

ROWS, BY_DEVICE = 12, PartitionSpec("device")


@contextlib.contextmanager
def split_client(transport, terms, folder, devices):
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(open_servers(transport, terms, folder))
        compute = functools.partial(exact_deltas, shapes=terms.shapes)
        for server in servers:
            stack.enter_context(serving(server, compute))
        clients = [open_client(transport, terms, servers, folder) for _ in range(devices)]
        client = SplitClient(clients)
        stack.callback(client.close)
        client.set_limit(20.0)
        yield client, clients, servers


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_each_device_exchanges_its_own_rows(tmp_path, transport):
    """Devices with other rows, or none: every delta comes back to its own row."""
    terms, rng = terms_of(), np.random.default_rng(0)
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices()[:2])
    with split_client(transport, terms, tmp_path, 2) as (client, clients, servers):

        def step(arguments):
            x, ys, rows = jax.tree.map(lambda leaf: leaf[0], arguments)
            x = client.push(x, GATE_UP, 1, rows)
            return jax.tree.map(lambda leaf: leaf[None], client.wait_add(ys, x, GATE_UP, rows))

        program = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=BY_DEVICE, out_specs=BY_DEVICE, check_vma=False)
        )
        for real in ((12, 12), (0, 7), (5, 1), (3, 0)):
            batches = [batch(terms, rng, ROWS, num_real=n, base_share=0.2) for n in real]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
            ys, status = program(jax.device_put(stacked, NamedSharding(mesh, BY_DEVICE)))
            assert not np.asarray(status).any()
            for device, (x, before, rows) in enumerate(batches):
                wanted = want_ys(terms.shapes, GATE_UP, 1, x, before, rows)
                assert [bits(np.asarray(y)[device]) for y in ys] == [bits(y) for y in wanted]
        assert not client.lost()
        stats = client.stats()
        each = [one.stats() for one in clients]
        assert stats.pushes == sum(one.pushes for one in each) > max(one.pushes for one in each)
        assert stats.longest_wait == max(one.longest_wait for one in each)
        assert all(len(server.clients()) == 2 for server in servers)


def test_what_one_client_has_lost_is_lost(tmp_path):
    terms = terms_of()
    with split_client("in_process", terms, tmp_path, 2) as (client, clients, _):
        clients[1].close()
        assert client.lost() == tuple(range(client.servers))
        assert not clients[0].lost()
        with pytest.raises(NotImplementedError):
            client.grouped([client])
