"""Kinds are objects that JSON, metrics and logs spell as before."""

import json

import pytest

from lora_jax.adapters.kinds import AdapterKind


def test_a_kind_is_its_name_wherever_text_is_made_of_it():
    assert [f"{kind}" for kind in AdapterKind] == ["lora", "esft", "pair"]
    assert json.dumps({"kind": AdapterKind.ESFT}) == '{"kind": "esft"}'
    assert {AdapterKind.LORA: 1}["lora"] == 1


def test_other_kinds_are_refused():
    with pytest.raises(ValueError, match="head"):
        AdapterKind("head")
