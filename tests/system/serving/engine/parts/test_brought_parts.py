"""The catalogue with what adapters bring: only where there is room for it."""

from support.cases import adapter_cases
from support.cases.brought_cases import FIXTURES

from serving.api.config import EngineConfig
from serving.engine.parts.brought_parts import take_brought

PLAIN = {"plain": FIXTURES / "qwen2" / "plain", "gone": FIXTURES / "gone"}


def test_without_room_the_catalogue_stays():
    kept = object()
    config = EngineConfig("m")
    assert take_brought(None, kept, config, PLAIN, has_server=False) == (kept, None)


def test_an_engine_for_plain_lora_alone_says_so_in_the_catalogue():
    split = EngineConfig("m", tensor_parallel_size=2)
    kept, norms = take_brought(None, adapter_cases.llama(), split, PLAIN, has_server=False)
    assert (kept.only_lora, norms) == ("tensor_parallel_size 2", None)
