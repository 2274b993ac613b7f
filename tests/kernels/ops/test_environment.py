"""Variables of the environment are set within a block alone."""

import os

import pytest

from lora_jax.ops.environment import environment

NEW, OLD = "LORA_JAX_TEST_NEW", "LORA_JAX_TEST_OLD"


def test_variables_are_set_within_and_as_before_behind(monkeypatch):
    monkeypatch.delenv(NEW, raising=False)
    monkeypatch.setenv(OLD, "before")
    with environment({NEW: "1", OLD: "within"}):
        assert (os.environ[NEW], os.environ[OLD]) == ("1", "within")
    assert (os.environ.get(NEW), os.environ[OLD]) == (None, "before")


def test_they_are_as_before_behind_an_error_too(monkeypatch):
    monkeypatch.setenv(OLD, "before")

    def fail():
        with environment({NEW: "1", OLD: "within"}):
            del os.environ[NEW]
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert (os.environ.get(NEW), os.environ[OLD]) == (None, "before")
