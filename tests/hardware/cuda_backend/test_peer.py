"""The transport between GPUs on real ones; the transport's own tests have the same emulated."""

import jax
import pytest
from support.contracts.peer_contract import PeerContract
from support.doubles.peer_double import OneProcess, RealGpus, Sockets

pytestmark = pytest.mark.multigpu


@pytest.fixture(autouse=True)
def _needs_two_gpus():
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")


class TestOneProcess(PeerContract):
    transport = OneProcess(RealGpus())


class TestSockets(PeerContract):
    transport = Sockets(RealGpus())
