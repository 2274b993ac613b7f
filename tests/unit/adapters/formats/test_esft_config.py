"""expert_cfg.json: what the released files say, and every way to get it wrong."""

import json

import pytest

from lora_jax.adapters.formats import esft_config

RELEASED = [("intent", 124), ("law", 153), ("summary", 128), ("translation", 83)]
GOOD = {"experts": {"2": [5, 1], "10": [], "1": [0]}, "shared_experts": False}


def parse(config) -> dict[int, tuple[int, ...]]:
    return esft_config.parse(json.dumps(config).encode())


def test_layers_and_experts_come_sorted_and_empty_layers_go():
    assert list(parse(GOOD).items()) == [(1, (0,)), (2, (1, 5))]


@pytest.mark.parametrize(("name", "total"), RELEASED)
def test_released_configs(real_data, name, total):
    experts = esft_config.parse((real_data / f"esft/expert_configs/{name}.json").read_bytes())
    assert sum(map(len, experts.values())) == total
    assert list(experts) == list(range(1, 27))


BAD = {
    "not json": (b"{", "not valid JSON"),
    "not text": (b"\xff\xfe", "not valid JSON"),
    "a list": (b"[]", "not a JSON object"),
    "a key twice": (b'{"experts": {}, "experts": {}}', "the key 'experts' stands twice"),
    "a layer twice": (b'{"experts": {"1": [0], "01": [1]}}', "names a layer twice"),
    "no experts": ({}, "experts must map layers"),
    "experts is a list": ({"experts": [1]}, "experts must map layers"),
    "unknown key": (GOOD | {"rank": 4}, "unknown keys rank"),
    "shared experts": (GOOD | {"shared_experts": True}, "shared_experts is true: the adapter"),
    "other modules": (GOOD | {"non_expert_modules": True}, "non_expert_modules is true"),
    "flag that is none": (GOOD | {"shared_experts": 1}, "shared_experts must be true or false"),
    "layer with a sign": ({"experts": {"-1": [0]}}, "'-1' is not the number of a layer"),
    "layer with a name": ({"experts": {"one": [0]}}, "'one' is not the number of a layer"),
    "expert below 0": ({"experts": {"1": [-1]}}, "experts of layer 1 must be a list"),
    "expert as text": ({"experts": {"1": ["0"]}}, "experts of layer 1 must be a list"),
    "expert true": ({"experts": {"1": [True]}}, "experts of layer 1 must be a list"),
    "expert twice": ({"experts": {"1": [3, 3]}}, "layer 1 has an expert twice: 3, 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(name):
    config, message = BAD[name]
    data = config if isinstance(config, bytes) else json.dumps(config).encode()
    with pytest.raises(ValueError, match=message):
        esft_config.parse(data)
