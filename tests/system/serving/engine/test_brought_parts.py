"""Room for what adapters bring: as the config says, else as the adapters need."""

import pytest
from support.cases.brought_cases import FIXTURES

from serving.api.config import EngineConfig
from serving.engine.brought_parts import take_brought, takes_gains

ADAPTERS = {name: FIXTURES / "qwen2" / name for name in ("plain", "dora", "bias_all")}
PLAIN = {"plain": ADAPTERS["plain"], "gone": FIXTURES / "gone"}


def test_gains_come_from_the_config_or_the_adapters():
    on, off = (EngineConfig("m", enable_dora_and_bias=wanted) for wanted in (True, False))
    default = EngineConfig("m")
    assert takes_gains(on, {}, False)
    assert not takes_gains(off, ADAPTERS, False)
    assert not takes_gains(default, PLAIN, False)
    for name in ("dora", "bias_all"):
        assert takes_gains(default, {name: ADAPTERS[name]}, False)
    assert not takes_gains(default, ADAPTERS, True)  # its load says what a server needs


@pytest.mark.parametrize(
    ("fields", "has_server", "message"),
    [
        ({}, True, "enable_dora_and_bias does not go with a LoRA Server"),
        ({"tensor_parallel_size": 2}, False, "does not go with tensor_parallel_size 2"),
        ({"merge_adapter": "x"}, False, "does not go with merge_adapter x"),
    ],
)
def test_what_it_does_not_go_with(fields, has_server, message):
    config = EngineConfig("m", enable_dora_and_bias=True, **fields)
    with pytest.raises(ValueError, match=message):
        takes_gains(config, {}, has_server)


def test_without_room_the_catalogue_stays():
    kept = object()
    config = EngineConfig("m")
    assert take_brought(None, kept, config, PLAIN, has_server=False) == (kept, None)
