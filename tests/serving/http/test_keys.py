"""Keys lead to callers; the keys file says what tenants may do."""

import pytest

from serving.http.keys import KeyRing, TokenBucket, read_keys_file
from serving.http.settings import HttpSettings, Tenant


def test_roles():
    ring = KeyRing(HttpSettings(api_keys=("u",), admin_keys=("a",), metrics_keys=("m",)))
    user, admin, metrics = (ring.find(key) for key in "uam")
    assert (user.uses_model, user.is_admin, user.reads_metrics) == (True, False, False)
    assert (admin.uses_model, admin.is_admin, admin.reads_metrics) == (True, True, True)
    assert (metrics.uses_model, metrics.is_admin, metrics.reads_metrics) == (False, False, True)
    assert ring.find("x") is None
    assert not ring.anonymous.uses_model
    assert not ring.anonymous.is_admin


def test_without_keys_everybody_may_do_everything():
    anonymous = KeyRing(HttpSettings()).anonymous
    assert anonymous.uses_model
    assert anonymous.is_admin
    assert anonymous.reads_metrics
    assert anonymous.salt == ""
    assert not KeyRing(HttpSettings(admin_keys=("a",))).anonymous.is_admin


def test_salts_differ_by_key_and_do_not_show_it():
    ring = KeyRing(HttpSettings(api_keys=("one-key", "two-key")))
    one, two = ring.find("one-key"), ring.find("two-key")
    assert one.salt != two.salt
    assert "key" not in one.salt


def test_bucket_allows_the_rate_and_says_how_long_to_wait():
    now = [0.0]
    bucket = TokenBucket(2.0, clock=lambda: now[0])
    assert [bucket.wait_s() for _ in range(3)] == [0.0, 0.0, 0.5]
    now[0] = 0.25
    assert bucket.wait_s() == pytest.approx(0.25)
    now[0] = 0.5
    assert bucket.wait_s() == 0.0
    now[0] = 100.0
    assert [bucket.wait_s() > 0 for _ in range(3)] == [False, False, True]


def test_a_slow_bucket_still_lets_one_through():
    now = [0.0]
    bucket = TokenBucket(0.1, clock=lambda: now[0])
    assert bucket.wait_s() == 0.0
    assert bucket.wait_s() == pytest.approx(10.0)


def test_keys_file(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text("k1: {adapters: [sql, law], rate: 2.5, salt: team}\nk2: {}\nk3:\n")
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
    path.write_text(text)
    with pytest.raises(ValueError, match=problem) as error:
        read_keys_file(path)
    assert "secret" not in str(error.value)
