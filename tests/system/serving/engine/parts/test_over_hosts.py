"""Features that an instance over hosts refuses."""

from types import SimpleNamespace

import pytest

from serving.api.config import EngineConfig
from serving.engine.parts.over_hosts import check_gang, shared, teller

TWO = SimpleNamespace(size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size 1 must be a multiple of the 2 nodes"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 must be a multiple of the 2 nodes"),
        ({"max_esft_adapters": 2}, "over several hosts has no max_esft_adapters: set 0"),
        ({"kv_offloading_size": 1.0}, "over several hosts has no kv_offloading_size: set 0"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    config = EngineConfig("m", **{"tensor_parallel_size": 2} | fields)
    with pytest.raises(ValueError, match=message):
        check_gang(config, TWO)


def test_room_for_esft_adapters_is_left_out():
    config = EngineConfig("m", tensor_parallel_size=2)
    assert check_gang(config, TWO).max_esft_adapters == 0
    assert check_gang(config, None) is config


def test_one_process_shares_with_nobody():
    value = object()
    assert shared(None, value) is value
    assert teller(None)(value) is None
