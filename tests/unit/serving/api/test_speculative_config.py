import pytest

from serving.api.config import EngineConfig
from serving.api.speculative_config import SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 5, 5),
        ({"prompt_lookup_max": 4}, 4, 4),
        ({"prompt_lookup_min": 2}, 2, 2),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 6}, 2, 6),
    ],
)
def test_lookups_are_as_vllm_has_them(given, low, high):
    assert SpeculativeConfig.of({**NGRAM, **given}) == SpeculativeConfig(4, low, high)


def test_without_one_an_engine_does_not_speculate():
    assert EngineConfig("m").speculation is None
    assert EngineConfig("m", speculative_config=NGRAM).speculation == SpeculativeConfig(4, 5, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must map names to values"),
        ({"method": "eagle", "num_speculative_tokens": 4}, 'method must be "ngram", got .eagle.'),
        ({"num_speculative_tokens": 4}, "method must be"),
        ({"method": "ngram"}, "num_speculative_tokens must be an integer .*it is not given"),
        ({**NGRAM, "num_speculative_tokens": 33}, r"in \[1, 32\], got 33"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens must be an integer"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min must be an integer"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "must be at most"),
        ({**NGRAM, "model": "draft"}, "speculative_config.model is not one of"),
    ],
)
def test_what_is_not_there_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig("m", speculative_config=given)


def test_several_devices_may_speculate():
    config = EngineConfig("m", speculative_config=NGRAM, tensor_parallel_size=2)
    assert config.speculation == SpeculativeConfig(4, 5, 5)
