"""GPUs that one process compiles once, for all files that use them."""

import pytest
from support.doubles.peer_double import EmulatedGpus


@pytest.fixture(scope="session")
def gpus(tmp_path_factory) -> EmulatedGpus:
    return EmulatedGpus(tmp_path_factory.mktemp("gpus"))
