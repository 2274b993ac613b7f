"""The transport between devices: its contract, over emulated GPUs."""

import shutil

import pytest
from peer_double import EmulatedGpus, OneProcess, Sockets
from transport_contract import TransportContract

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory) -> EmulatedGpus:
    return EmulatedGpus(tmp_path_factory.mktemp("gpus"))


class TestSockets(TransportContract):
    @pytest.fixture(autouse=True)
    def _carrier(self, gpus):
        self.carrier = Sockets(gpus)


class TestOneProcess(TransportContract):
    @pytest.fixture(autouse=True)
    def _carrier(self, gpus):
        self.carrier = OneProcess(gpus)
