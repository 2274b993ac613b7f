"""Programs of a LoRA Server compiled for an H200: one CUDA graph takes, computes and answers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from kernels.aot.compile_gpu import H200, plugin_is_found
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from bench.lora_server import programs
from bench.lora_server.plans import LORA, PLANS, Case
from lora_jax.ops import dispatch
from serving.lora_server import device_loop
from serving.lora_server.rank import RankSizes, ServerRank
from serving.lora_server.spec import ServerSpec, design
from serving.lora_server.transport.device_server import DeviceServer, RankTable, no_ticket
from serving.lora_server.whole_layout import WholeLayout

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]  # the kernels are built, too
SHAPE = TinyShape(max_positions=96, experts=4, hidden=256, width=128, layers=2)


@pytest.fixture
def server(monkeypatch):
    """A server whose custom calls can be traced; skip without the compilers for an H200."""
    from cuda_backend import ffi
    from cuda_backend.peer_endpoints import ServerEndpoint
    from cuda_backend.toolkit import find_compilers

    if not plugin_is_found() or not find_compilers():
        pytest.skip("the CUDA plugin or nvcc is missing: make test-aot")
    ffi.library().load(dispatch.cache_folder())
    monkeypatch.setattr(ffi, "require", lambda: None)
    found, end = object.__new__(DeviceServer), object.__new__(ServerEndpoint)
    found._endpoint, end.number = end, 1
    return found


def described(h200, tree):
    return jax.tree.map(lambda array: h200.array(array.shape, array.dtype), tree)


def test_a_ranks_program_is_one_graph_with_its_loop(server, tmp_path, monkeypatch):
    tiny_checkpoint.write_model(tmp_path, SHAPE)
    sizes = {"num_adapters": 4, "max_rank": 8, "max_rows": 64}
    made = design(ServerSpec(str(tmp_path), "bfloat16", "ep1-pp1", 1, **sizes))
    rank = ServerRank(made.catalogue, made.layout.shard(0), made.sizes, jnp.dtype("bfloat16"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    server.shapes = made.terms.shapes
    done = compiled(rank, server, H200())
    assert done.thunks == ["kCommandBuffer"]
    assert done.in_graphs > 20  # accept, judge, compute and answer, for each site
    pools = sum(leaf.size * leaf.dtype.itemsize for leaf in rank.slots.pools.values())
    assert done.temp_bytes < pools  # the loop carries no copy of them


def compiled(rank, server, h200):
    """Return the program of a rank, compiled for a device that is not there."""
    leaves, tree = jax.tree.flatten(rank.slots)
    number, places = h200.array((), jnp.int32), h200.array((4,), jnp.int32)
    program = device_loop._program(rank, server)

    def serve(leaves, places, version, lines, said, limits):
        table = RankTable(places, places, places, version, places)
        said = device_loop._Said(*said)
        return program.__wrapped__(tree.unflatten(leaves), table, lines, said, limits)

    lines = described(h200, (no_ticket(rank.most_messages),) * len(rank.sites))
    kept = lines, (lines, number), h200.array((2,), jnp.int32)
    arguments = (described(h200, leaves), places, number, *kept)
    return h200.compile(serve, *arguments, donate=(3, 4), options=device_loop.ONE_GRAPH)


@pytest.mark.parametrize("experts", [0, 4])
def test_the_program_of_all_adapters_whole_is_one_graph(server, tmp_path, monkeypatch, experts):
    """Isolation "server" of functions: four sites of each layer, of models without experts too."""
    shape = dataclasses.replace(SHAPE, experts=experts)
    tiny_checkpoint.write_model(tmp_path, shape)
    layout = WholeLayout(str(tmp_path))
    sizes = RankSizes(4, 8, 64 * layout.top_k, layerwise=False)
    rank = ServerRank(layout.catalogue, layout.shard, sizes, jnp.dtype("bfloat16"))
    assert len(rank.sites) == 4
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    server.shapes = layout.terms(sizes.max_rows, "bfloat16", 4).shapes
    done = compiled(rank, server, H200())
    assert done.thunks == ["kCommandBuffer"]


def test_the_benchs_program_is_one_graph(server, monkeypatch):
    case = Case("small", 256, 512, 4, 2, rank=16, adapters=8, layers=2)
    server.shapes, h200 = PLANS["EP1-PP1"].terms(case, 16).shapes, H200()
    pools = described(h200, jax.eval_shape(lambda: programs.make_pools(case)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    told = described(h200, programs.orders(LORA))
    arguments = described(h200, no_ticket()), pools, told
    program = programs.server_program(case, server, None)
    done = h200.compile(program, *arguments, options=device_loop.ONE_GRAPH)
    assert done.thunks == ["kCommandBuffer"]
    assert done.in_graphs > 20  # of both sites, in turn
