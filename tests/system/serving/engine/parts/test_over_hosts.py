"""The config of an instance over hosts, and what its processes share."""

from types import SimpleNamespace

import pytest

from serving.api.config import EngineConfig
from serving.engine.parts.over_hosts import for_hosts, shared, teller

TWO = SimpleNamespace(size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size 1 must be a multiple of the 2 nodes"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 must be a multiple of the 2 nodes"),
    ],
)
def test_nodes_have_equal_parts_of_the_devices(fields, message):
    config = EngineConfig("m", **{"tensor_parallel_size": 2} | fields)
    with pytest.raises(ValueError, match=message):
        for_hosts(config, TWO)


def test_room_for_esft_adapters_is_left_out():
    config = EngineConfig("m", tensor_parallel_size=2)
    assert for_hosts(config, TWO).max_esft_adapters == 0
    assert for_hosts(config, None) is config


def test_one_process_shares_with_nobody():
    value = object()
    assert shared(None, value) is value
    assert teller(None)(value) is None
