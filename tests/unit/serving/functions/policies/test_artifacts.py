"""Artifacts state what they need and refuse what cannot be."""

import pytest

from serving.functions.policies.artifacts import Artifact, by_name

BACKBONE = Artifact("backbone", 10, ("a", "b"), host_s=1.0, device_s=3.0)
ADAPTER = Artifact("adapter", 1, ("a",), host_s=0.1, device_s=0.2, requires=("backbone",))


def test_rate_of_a_shared_artifact_is_the_sum_over_its_functions():
    assert BACKBONE.rate({"a": 0.5, "b": 0.25, "c": 9.0}) == 0.75


def test_order_puts_requirements_first():
    assert list(by_name([ADAPTER, BACKBONE])) == ["backbone", "adapter"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "neither host_s nor device_s"),
        ({"host_s": -1.0}, "seconds 0 or more"),
        ({"device_s": float("inf")}, "seconds 0 or more"),
        ({"host_s": 2.0, "device_s": 1.0}, "device_s 1.0 is below host_s 2.0"),
        ({"host_s": 1.0, "num_bytes": 0}, "num_bytes must be 1 or more"),
    ],
)
def test_impossible_artifacts_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        Artifact(**{"name": "x", "num_bytes": 1, "functions": (), **fields})


def test_circles_unknown_and_double_names_are_refused():
    first = Artifact("first", 1, (), host_s=1.0, requires=("second",))
    second = Artifact("second", 1, (), host_s=1.0, requires=("first",))
    with pytest.raises(ValueError, match="first requires second"):
        by_name([first, second])
    with pytest.raises(ValueError, match="unknown"):
        by_name([ADAPTER])
    with pytest.raises(ValueError, match="backbone"):
        by_name([BACKBONE, Artifact("backbone", 2, (), host_s=1.0)])
