"""Messages of a traced step, and its status when an answer is late."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from lora_jax.nn.remote import Exchange, RemoteExperts
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from lora_jax.sharding import AXIS, Split, make_mesh
from serving.lora_server.client import LOCAL, RemoteTable, ServerLink
from serving.lora_server.shards import ShardLayout
from serving.lora_server.transport.base import Status
from serving.lora_server.transport.shapes import DOWN, GATE_UP, OUT, QKV, moe_shapes

GATE_AND_UP, ONLY_DOWN = ("experts.gate_proj", "experts.up_proj"), ("experts.down_proj",)
MOE_LAYERS = (1, 3)


class Transport:
    """Notes what is sent while the step is traced, and adds 1 to rows that went."""

    def __init__(self, servers=4):
        self.servers, self.sent, self.status = servers, [], [0] * servers

        self.shapes = moe_shapes(len(MOE_LAYERS), 8, 8, 8, "float32")
        self.log = []

    def push(self, x, site, layer, rows):
        self.sent.append((site, layer, rows))
        self.log.append("push")
        return x

    def wait_add(self, ys, keep, site, rows):
        self.log.append("wait")
        went = (rows.row_to_server >= 0)[:, None]
        status = jnp.asarray(self.status, jnp.int32)
        return tuple(jnp.where(went, y + 1, y) for y in ys), status


def make_link(transport=None, **options):
    placement = ServerLayout(AdapterShape(4, len(MOE_LAYERS), 4, 1), ep=2, pp=2)
    return ServerLink(ShardLayout(placement, MOE_LAYERS), transport or Transport(), **options)


def run(link, numbers, row_to_slot, row_to_expert, layer):
    table = RemoteTable(jnp.asarray(numbers, jnp.int32), jnp.int32(7))
    step = link.start(table)
    assert isinstance(step, RemoteExperts)
    x = jnp.zeros((len(row_to_slot), 8), jnp.float32)
    rows = [jnp.asarray(values, jnp.int32) for values in (row_to_slot, row_to_expert)]
    for names, ys in ((GATE_AND_UP, (x, x)), (ONLY_DOWN, (x,))):
        exchange = step.exchange(names, layer, *rows, jnp.int32(len(row_to_slot)))
        assert isinstance(exchange, Exchange)
        ys = exchange.wait_add(ys, exchange.push(x))
    return np.asarray(ys[0]), np.asarray(step.status())


def test_rows_go_to_the_rank_of_their_layer_and_expert_under_the_servers_number():
    link = make_link()
    y, status = run(link, [12, LOCAL, 5], [0, -1, 2, 1, 0], [0, 0, 1, 2, 3], layer=3)
    assert [(site, layer) for site, layer, _ in link.client.sent] == [(GATE_UP, 1), (DOWN, 1)]
    for _, _, rows in link.client.sent:
        np.testing.assert_array_equal(rows.row_to_adapter, [12, LOCAL, 5, LOCAL, 12])
        np.testing.assert_array_equal(rows.row_to_server, [2, -1, 2, -1, 3])
        np.testing.assert_array_equal(rows.row_to_expert, [0, 0, 1, 2, 3])
        assert (int(rows.num_rows), int(rows.table_version)) == (5, 7)
    np.testing.assert_array_equal(y[:, 0], [1, 0, 1, 0, 1])
    assert not status.any()


def test_attention_goes_to_the_rank_of_its_layers_first_expert():
    link = make_link()
    layout = dataclasses.replace(link.layout, attention=True)
    link.layout = layout
    step = link.start(RemoteTable(jnp.asarray([12], jnp.int32), jnp.int32(7)))
    assert step.has("q_proj", 1)
    assert not step.has("q_proj", 0)
    assert not step.has("router", 1)
    x, rows = jnp.zeros((3, 8), jnp.float32), jnp.asarray([0, -1, 0], jnp.int32)
    for modules in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
        step.exchange(modules, 3, rows, None, jnp.int32(3)).push(x)
    assert [(site, layer) for site, layer, _ in link.client.sent] == [(QKV, 1), (OUT, 1)]
    for _, _, sent in link.client.sent:
        np.testing.assert_array_equal(sent.row_to_server, [2, -1, 2])
        np.testing.assert_array_equal(sent.row_to_expert, [0, 0, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_overlap_the_base_waits_for_the_answer_and_the_bits_are_the_same(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (4, 8)), dtype)  # exact sums
    rows = [jnp.asarray([0, -1, 0, -1], jnp.int32), jnp.asarray([0, 0, 1, 3], jnp.int32)]
    table, found = RemoteTable(jnp.asarray([5], jnp.int32), jnp.int32(7)), []
    for overlap in (True, False):
        link = make_link(overlap=overlap)

        @jax.jit
        def layer(x, link=link):
            exchange = link.start(table).exchange(ONLY_DOWN, 1, *rows, jnp.int32(4))
            x = exchange.push(x)
            link.client.log.append("base")
            return exchange.wait_add((x * 3,), x)

        found.append(np.asarray(layer(x)[0]))
        order = ["push", "base", "wait"] if overlap else ["push", "wait", "base"]
        assert link.client.log == order
    np.testing.assert_array_equal(*found)
    # The compiled program too: the base's input is made of the status.
    text = str(jax.make_jaxpr(layer)(x))
    assert text.index("reduce_min") < text.index("mul")


def test_a_step_knows_whether_adapters_may_be_local():
    assert make_link(has_local=True).start(None).has_local
    assert not make_link().start(None).has_local


def test_the_worst_status_of_a_step_is_kept_for_each_server():
    transport = Transport()
    link = make_link(transport)
    step = link.start(RemoteTable(jnp.zeros(1, jnp.int32), jnp.int32(0)))
    x, rows = jnp.zeros((2, 8), jnp.float32), jnp.zeros(2, jnp.int32)
    for status in ([0, 1, 0, 0], [0, 2, 0, 3], [0, 0, 0, 0]):
        transport.status = status
        step.exchange(ONLY_DOWN, 1, rows, rows, jnp.int32(2)).wait_add((x,), x)
    np.testing.assert_array_equal(step.status(), [0, Status.ABORTED, 0, Status.REFUSED])


def test_a_step_over_devices_has_the_worst_status_of_all_of_them():
    split = Split(make_mesh(2))

    def status(found):
        step = make_link().start(None, split)
        step.statuses.append(found[0])
        return step.status()

    specs = {"in_specs": P(AXIS), "out_specs": P(), "check_vma": False}
    over_devices = jax.jit(jax.shard_map(status, mesh=split.mesh, **specs))
    by_device = np.array([[0, 1, 0, 0], [2, 0, 0, 3]], np.int32)
    np.testing.assert_array_equal(over_devices(by_device), [2, 1, 0, 3])


def test_a_step_without_exchanges_is_well():
    assert not np.asarray(make_link().start(None).status()).any()


def test_a_table_is_data_of_the_program():
    table = RemoteTable(jnp.zeros(3, jnp.int32), jnp.int32(0))
    assert len(jax.tree.leaves(table)) == 2


def test_a_transport_of_another_server_is_refused():
    with pytest.raises(ValueError, match=r"EP2-PP2 has 4 ranks, but 3 servers"):
        make_link(Transport(servers=3))
