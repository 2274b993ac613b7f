"""Limits of functions are refused in the words of the flags."""

import pytest

from serving.api.functions_config import FIELDS, FunctionsConfig, check_options, checked_fields

AGENT = dict.fromkeys(("keep_alive_s", "memory_bytes", "ttft_slo_s", "max_tenants", "verify_s"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"functions": "d", "functions_keep_alive_s": 0}, r"keep_alive_s must be in \(0"),
        (
            {"functions": "d", "functions_memory_bytes": 0},
            "memory_bytes must be an integer at least 1",
        ),
        ({"functions": "d", "functions_ttft_slo_s": 0}, r"ttft_slo_s must be in \(0"),
        ({"functions": "d", "functions_isolation": "full"}, "one of none, server, process, got"),
        (
            {"functions": "d", "functions_max_tenants": 4},
            "of functions_isolation server or none",
        ),
        (
            {"functions": "d", "functions_isolation": "server", "functions_max_tenants": 0},
            r"in 1\.\.256, got 0",
        ),
        (
            {"functions": "d", "functions_isolation": "none", "functions_ttft_slo_s": 1.0},
            "one engine batches them all",
        ),
        ({"functions": "d", "functions_verify_s": 0.0}, r"verify_s must be in \(0"),
        ({"functions": "d", "functions_keep_alive_s": float("nan")}, "seconds, got nan"),
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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"keep_alive_s": -1}, r"^keep_alive_s must be in \(0, 1e\+09\] seconds, got -1\."),
        ({"keep_alive_s": "5"}, r"^keep_alive_s must be .*, got '5'"),
        ({"ttft_slo_s": True}, r"^ttft_slo_s must be .*, got True"),
        ({"verify_s": float("inf")}, r"^verify_s must be .*, got inf"),
        ({"memory_bytes": "5g"}, "^memory_bytes must be an integer at least 1, got '5g'"),
        ({"memory_bytes": -5}, "^memory_bytes must be an integer at least 1, got -5"),
        ({"memory_bytes": 1e9}, r"^memory_bytes must be an integer at least 1, got 1000000000\.0"),
        ({"max_tenants": "3", "isolation": "server"}, r"^max_tenants .* in 1\.\.256, got '3'"),
        ({"max_tenants": 3}, "^max_tenants is a size of isolation server or none"),
        ({"isolation": "none", "ttft_slo_s": 1}, "^ttft_slo_s gives functions turns; with isol"),
    ],
)
def test_an_agent_s_options_are_named_as_they_were_given(option, message):
    check_options(AGENT | {"isolation": "process"})
    with pytest.raises(ValueError, match=message):
        check_options(AGENT | {"isolation": "process"} | option)


def test_fields_of_all_functions_are_checked_before_anything_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"^Cannot share .*: there is no config\.json"):
        checked_fields(str(tmp_path), None, {})
    (tmp_path / "config.json").write_text("{}")
    assert checked_fields(str(tmp_path), None, {}) == FIELDS
    given = {"max_loras": 3, "dtype": "float32"}
    assert checked_fields(str(tmp_path), "float32", {"max_loras": 3}) == FIELDS | given
    with pytest.raises(ValueError, match=r"^'max_lora' is no field .* mean 'max_loras'"):
        checked_fields(str(tmp_path), None, {"max_lora": 3})
    with pytest.raises(ValueError, match="max_num_seqs"):
        checked_fields(str(tmp_path), None, {"max_num_seqs": 0})
