"""Limits of functions are refused in the words of the flags."""

import pytest

from serving.api.functions_config import FunctionsConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"functions": "d", "functions_keep_alive_s": 0}, r"keep_alive_s must be in \(0"),
        ({"functions": "d", "functions_memory_bytes": 0}, "memory_bytes must be at least 1, got 0"),
        ({"functions": "d", "functions_ttft_slo_s": 0}, r"ttft_slo_s must be in \(0"),
        ({"functions": "d", "functions_isolation": "full"}, "one of none, server, process, got"),
        ({"functions": "d", "functions_max_tenants": 4}, "a size of isolation server or none"),
        (
            {"functions": "d", "functions_isolation": "server", "functions_max_tenants": 0},
            r"in 1\.\.256, got 0",
        ),
        (
            {"functions": "d", "functions_isolation": "none", "functions_ttft_slo_s": 1.0},
            "one engine batches them all",
        ),
        ({"functions": "d", "functions_verify_s": 0.0}, r"verify_s must be in \(0"),
        ({"functions_isolation": "server"}, "must go with --functions"),
        ({"functions_ttft_slo_s": 5}, "must go with --functions"),
        ({"functions_memory_bytes": 5}, "must go with --functions"),
        ({"functions_keep_alive_s": 5}, "must go with --functions"),
    ],
)
def test_contradictions(fields, message):
    assert FunctionsConfig().functions is None
    with pytest.raises(ValueError, match=message):
        FunctionsConfig(**fields)
