"""Sides that do not fit each other are told what differs and what to change."""

import dataclasses
import re

import pytest
from support.cases.transport_cases import terms_of

from serving.lora_server.transport.compatibility import mismatch


def test_equal_terms_fit():
    assert mismatch(terms_of().facts(1), terms_of().facts(1)) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": "x"}, "base model: the server has tiny, the instance x; start both sides with"),
        ({"ep": 4}, "placement: the server has EP2-PP1, the instance EP4-PP1; .*--placement"),
        ({"dtype": "bfloat16"}, "dtype: the server has float32, the instance bfloat16; "),
        ({"max_rows": 5}, "rows in a slot: the server has 24, the instance 5; .*largest batch"),
    ],
)
def test_what_differs_is_said(change, said):
    found = mismatch(terms_of().facts(0), terms_of(**change).facts(0))
    assert found is not None
    assert found.count("the server has") == 1
    assert re.match(said, found)


def test_another_rank_and_missing_facts_are_said():
    assert "in the order of their ranks" in mismatch(terms_of().facts(0), terms_of().facts(1))
    found = mismatch(terms_of().facts(0), {})
    assert "protocol: the server has 1279939585, the instance nothing; install the same" in found
    assert found.count("the server has") == len(terms_of().facts(0))


def test_a_plan_of_other_layers_is_refused():
    terms = terms_of()
    with pytest.raises(ValueError, match="9 layers and the plan EP2-PP1 has 4"):
        dataclasses.replace(terms, shapes=dataclasses.replace(terms.shapes, layers=9))
