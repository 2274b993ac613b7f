"""GPUs and an engine that one process makes once, for all files that use them."""

import pytest
from support.doubles.peer_double import EmulatedGpus
from support.fixtures.http import oracle, real_client, real_engine, real_lora_dir

__all__ = ["gpus", "oracle", "real_client", "real_engine", "real_lora_dir"]


@pytest.fixture(scope="session")
def gpus(tmp_path_factory) -> EmulatedGpus:
    return EmulatedGpus(tmp_path_factory.mktemp("gpus"))
