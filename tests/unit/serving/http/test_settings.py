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
