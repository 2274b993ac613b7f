"""The transport over NIXL keeps the contract: over a double of it, and over itself where it is."""

import importlib.util
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.cases.transport_cases import LONG, SECRET, batch, connected, exchange, terms_of
from support.contracts.transport_contract import TransportContract
from support.doubles.nixl_double import Fabric
from support.processes.transport_faults import held_by_this_process, wait_given_back
from support.waiting import wait_until

from serving.lora_server.transport.base import Status, TransportError
from serving.lora_server.transport.hosts import nixl, tcp

MISSING = importlib.util.find_spec("nixl_cu13") is None
TERMS = terms_of(ep=1)


class ByNixl:
    """Opens endpoints for the shared cases; `agents` as open_server has them."""

    def __init__(self, agents):
        self._agents = agents

    def open_server(self, terms, rank, folder, **options):
        return nixl.open_server(
            folder / f"rank-{rank}", terms, rank, agents=self._agents, **options
        )

    def open_client(self, terms, servers, folder, **options):
        paths = [folder / f"rank-{rank}" for rank in range(len(servers))]
        return nixl.open_client(paths, terms, agents=self._agents, **options)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
class TestOverADouble(TransportContract):
    transport = ByNixl(Fabric().agent)


@pytest.mark.skipif(MISSING, reason="no NIXL")
class TestOverNixl(TransportContract):
    transport = ByNixl(nixl.make_agent)


def test_without_the_package_the_transport_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl, "_PACKAGES", ("no_such_nixl",))
    with pytest.raises(NotImplementedError, match=r"lora-jax\[nixl\]"):
        nixl.open_server(tmp_path / "rank-0", TERMS, 0)
    with pytest.raises(NotImplementedError, match="nixl-cu13"):
        nixl.open_client([tmp_path / "rank-0"], TERMS)
    listening = tcp.listen("127.0.0.1", 0)
    with pytest.raises(NotImplementedError, match="nixl-cu13"):
        nixl.open_far_server(listening, TERMS, 0, SECRET)
    assert listening.fileno() == -1


def test_between_hosts_both_sides_prove_that_they_know_a_secret():
    fabric = Fabric()
    listening = tcp.listen("127.0.0.1", 0)
    address = listening.getsockname()
    server = nixl.open_far_server(listening, TERMS, 0, SECRET, agents=fabric.agent)
    with pytest.raises(TransportError, match="The secrets differ"):
        nixl.open_far_client([address], TERMS, SECRET + b"x", agents=fabric.agent)
    client = nixl.open_far_client([address], TERMS, SECRET, patience=LONG, agents=fabric.agent)
    assert client.lost() == ()
    server.close()
    wait_until(lambda: client.lost() == (0,))
    client.close()


@pytest.mark.parametrize("broken", ["ended", "refused"])
def test_a_transfer_that_fails_loses_the_server_until_it_is_joined_again(tmp_path, broken):
    fabric = Fabric()
    transport = ByNixl(fabric.agent)
    with connected(transport, TERMS, tmp_path) as (client, _):
        client.set_limit(LONG)
        x, ys, rows = batch(TERMS, np.random.default_rng(0), 8, base_share=0.2)
        step = exchange(client)
        assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.ARRIVED]
        fabric.broken = broken
        assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.ABORTED]
        fabric.broken = ""
        wait_until(lambda: client.rejoin() == ())
        assert np.asarray(step(x, ys, rows)[1]).tolist() == [Status.ARRIVED]


def test_everything_is_given_back(tmp_path):
    fabric = Fabric()

    def use():
        with connected(ByNixl(fabric.agent), TERMS, tmp_path) as (client, _):
            x, ys, rows = batch(TERMS, np.random.default_rng(0), 8)
            assert not np.asarray(exchange(client)(x, ys, rows)[1]).any()

    use()
    before = held_by_this_process()
    for _ in range(3):
        use()
    wait_given_back(before)
    assert not fabric.registered


def test_an_agent_is_made_without_a_thread_that_spins_and_with_dead_peers_noticed(monkeypatch):
    made = []

    class Made:
        def __init__(self, name, config):
            self.given = [name, config]
            made.append(self)

        def create_backend(self, name, options):
            self.given += [name, options]

    package = SimpleNamespace(nixl_agent_config=lambda **given: given, nixl_agent=Made)
    monkeypatch.setitem(sys.modules, "nixl_of_this_test", package)
    monkeypatch.setattr(nixl, "_PACKAGES", ("no_such_nixl", "nixl_of_this_test"))
    for name in nixl._UCX:
        monkeypatch.setenv(name, "")  # so that what `make_agent` sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("UCX_SYSV_ERROR_HANDLING", "n")  # the operator's choice stays
    assert nixl.make_agent("rank-0") is made[0]
    config = {"enable_prog_thread": False, "backends": []}
    assert made[0].given == ["rank-0", config, "UCX", {"ucx_error_handling_mode": "peer"}]
    assert os.environ["UCX_POSIX_ERROR_HANDLING"] == "y"
    assert os.environ["UCX_SYSV_ERROR_HANDLING"] == "n"
