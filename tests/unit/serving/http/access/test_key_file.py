"""The keys file: both forms, each field, who may read and write it. Errors never name a key."""

import json
import os

import pytest

from serving.http.access.key_file import read_keys_file
from serving.http.access.key_hash import new_key
from serving.http.settings import KeyLimits, Tenant


def write(path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def line(key_id: str = "a", **fields) -> str:
    return json.dumps({"id": key_id, "hash": new_key(key_id)[1]} | fields) + "\n"


def test_keys_file(tmp_path):
    path = tmp_path / "keys.yaml"
    write(path, "k1: {adapters: [sql, law], rate: 2.5, salt: team}\nk2: {}\nk3:\n")
    assert read_keys_file(path) == (
        Tenant("k1", frozenset({"sql", "law"}), 2.5, "team"),
        Tenant("k2"),
        Tenant("k3"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must map"),
        ("- k1", "must map"),
        ("secret-1: {adaptors: []}", "entry 1: unknown field adaptors"),
        ("secret-1: {adapters: sql}", "adapters must be a list"),
        ("secret-1: {adapters: [1]}", "adapters must be a list"),
        ("secret-1: {rate: 0}", "rate"),
        ("secret-1: {rate: .nan}", "rate"),
        ("secret-1: {rate: true}", "rate"),
        ("secret-1: {salt: ''}", "salt"),
        ("12: {}", "key must be text"),
        ("secret-1: 3", "mapping"),
    ],
)
def test_keys_file_errors_name_the_entry_not_the_key(tmp_path, text, problem):
    path = tmp_path / "keys.yaml"
    write(path, text)
    with pytest.raises(ValueError, match=problem) as error:
        read_keys_file(path)
    assert "secret" not in str(error.value)


def test_lines_of_json_with_every_field(tmp_path):
    path = tmp_path / "keys"
    fields = {
        "adapters": ["sql"],
        "rate": 2,
        "salt": "team",
        "roles": ["user", "metrics"],
        "weight": 3,
        "limits": {"max_running": 4, "tokens_per_minute": 1000},
        "not_before": "1970-01-01T00:01:00Z",
        "expires": "1970-01-01T02:00:00+01:00",
    }
    text = line(**fields)
    write(path, f"# rotated in spring\n\n{text}{line('b')}", 0o644)
    one, two = read_keys_file(path)
    assert one == Tenant(
        id="a",
        hash=json.loads(text)["hash"],
        adapters=frozenset({"sql"}),
        rate=2,
        salt="team",
        roles=frozenset({"user", "metrics"}),
        weight=3.0,
        limits=KeyLimits(max_running=4, tokens_per_minute=1000),
        not_before=60.0,
        expires=3600.0,
    )
    assert two.id == "b"


def test_yaml_takes_the_same_fields(tmp_path):
    path = tmp_path / "keys"
    write(path, "k: {id: a, weight: 2, expires: 1970-01-01T00:01:00Z, limits: {max_adapters: 1}}")
    (tenant,) = read_keys_file(path)
    assert (tenant.id, tenant.weight, tenant.expires) == ("a", 2.0, 60.0)
    assert tenant.limits.max_adapters == 1


def test_several_keys_of_one_id_are_of_one_kind(tmp_path):
    path = tmp_path / "keys"
    write(path, line(weight=2) + line(weight=2, expires=5))
    assert len(read_keys_file(path)) == 2
    write(path, line(weight=2) + line(weight=3))
    with pytest.raises(ValueError, match="'a' must differ in hash"):
        read_keys_file(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hash": "sha256:00:11"}, "hash must be"),
        ({"id": "a b"}, "id must be"),
        ({"id": None}, "id must be"),
        ({"weight": 0}, "weight must be"),
        ({"weight": True}, "weight must be"),
        ({"roles": []}, "roles must be"),
        ({"roles": ["root"]}, "roles must be"),
        ({"limits": {"max_runing": 1}}, "limits must be"),
        ({"limits": {"max_running": 0}}, "limits must be"),
        ({"limits": 3}, "limits must be"),
        ({"expires": "soon"}, "expires must be"),
        ({"expires": -1}, "expires must be"),
        ({"secret": "x"}, "unknown field secret"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path, change, problem):
    path = tmp_path / "keys"
    write(path, line("good") + line(**change))
    with pytest.raises(ValueError, match=f"line 2: {problem}"):
        read_keys_file(path)


def test_what_others_may_read_or_write_is_refused(tmp_path):
    path = tmp_path / "keys"
    for mode in (0o640, 0o604, 0o644):
        write(path, "secret-key: {}", mode)
        with pytest.raises(ValueError, match=r"others may read it.*chmod 600"):
            read_keys_file(path)
    write(path, line(), 0o644)
    read_keys_file(path)
    for mode in (0o660, 0o602):
        write(path, line(), mode)
        with pytest.raises(ValueError, match="Others may change"):
            read_keys_file(path)
    os.unlink(path)
    os.mkfifo(path, 0o600)
    with pytest.raises(ValueError, match="plain file"):
        read_keys_file(path)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ("[1, 2]", "line 2: not a JSON object"),
        ("{", "line 2: not a JSON object"),
        ('{"id": "b", "hash": "md5:1"}', "line 2: hash must be sha256:SALT:DIGEST"),
        (json.dumps({"hash": new_key("b")[1]}), "line 2: id is missing"),
    ],
)
def test_a_line_that_is_no_entry_is_named(tmp_path, second, problem):
    write(tmp_path / "keys", line() + second + "\n")
    with pytest.raises(ValueError, match=problem):
        read_keys_file(tmp_path / "keys")


def test_a_day_is_its_beginning_in_utc(tmp_path):
    write(tmp_path / "keys", "k1: {expires: 2030-01-02}\n")
    (tenant,) = read_keys_file(tmp_path / "keys")
    assert tenant.expires == 1893542400.0
