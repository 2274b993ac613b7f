"""The transport between devices keeps the contract, over emulated GPUs."""

import shutil

import pytest
from support.cases.transport_cases import open_servers, terms_of
from support.contracts.peer_contract import PeerContract
from support.doubles.peer_double import OneProcess, Sockets

from serving.lora_server.transport import device_memory
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.device_server import DeviceServer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


class TestSockets(PeerContract):
    @pytest.fixture(autouse=True)
    def _transport(self, gpus):
        self.transport = Sockets(gpus)


@pytest.mark.long  # the same exchanges
class TestOneProcess(PeerContract):
    @pytest.fixture(autouse=True)
    def _transport(self, gpus):
        self.transport = OneProcess(gpus)


def test_memory_of_another_size_is_refused(gpus, tmp_path):
    """The handshake agrees; what came with it does not."""
    terms = terms_of(ep=1)
    with open_servers(Sockets(gpus), terms, tmp_path) as servers:
        endpoints, create = gpus.device(1), servers[0]._endpoints.create_channel
        servers[0]._endpoints = endpoints
        endpoints.create_channel = lambda client, request, response, **how: create(
            client, request + (4 << 20), response, **how
        )
        with pytest.raises(TransportError, match="cannot be mapped"):
            Sockets(gpus).open_client(terms, servers, tmp_path)


def test_servers_of_other_shapes_are_refused(gpus):
    shapes = [terms_of(dtype).shapes for dtype in ("float32", "bfloat16")]
    servers = [DeviceServer(s, gpus.device(1), pull=False) for s in shapes]
    with pytest.raises(ValueError, match="2 shapes"):
        device_memory.open_local_client(servers, gpus.device(0))
    for server in servers:
        server.close()
