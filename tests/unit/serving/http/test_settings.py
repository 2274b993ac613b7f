"""Contradictions are found before anything listens."""

import pytest

from serving.http.settings import HttpSettings, Tenant


@pytest.mark.parametrize(
    "values",
    [
        {"api_keys": ("",)},
        {"api_keys": (" k",)},
        {"api_keys": ("k",), "admin_keys": ("k",)},
        {"api_keys": ("k", "k")},
        {"tenants": (Tenant("k"),), "enable_runtime_lora": True},
        {"tenants": (Tenant("k"),), "api_keys": ("k",)},
    ],
)
def test_refused(values):
    with pytest.raises(ValueError, match="key"):
        HttpSettings(**values)


def test_which_keys_close_the_model():
    assert not HttpSettings(admin_keys=("a",), metrics_keys=("m",)).has_api_keys
    assert HttpSettings(api_keys=("k",)).has_api_keys
    assert HttpSettings(tenants=(Tenant("k"),)).has_api_keys


@pytest.mark.parametrize(
    ("calls", "thoughts"), [("openai", None), ("openai", "qwen3"), ("hermes", "openai_gptoss")]
)
def test_one_format_has_calls_and_thoughts_of_gpt_oss(calls, thoughts):
    with pytest.raises(ValueError, match="--reasoning-parser openai_gptoss and"):
        HttpSettings(tool_call_parser=calls, reasoning_parser=thoughts)
    HttpSettings(reasoning_parser="openai_gptoss")
