"""New keys are random, their hashes are theirs alone."""

import pytest

from serving.http.access.key_hash import id_of, is_key_of, new_key


def test_a_key_is_that_of_its_hash_only():
    key, hashed = new_key("team-a")
    assert id_of(key) == "team-a"
    assert is_key_of(hashed, key)
    assert key.partition(".")[2] not in hashed
    other, other_hash = new_key("team-a")
    assert not is_key_of(hashed, other)
    assert not is_key_of(other_hash, key)
    assert not is_key_of("plain", key)
    assert len(key) >= len("team-a.") + 43
    assert id_of("no-dot") == ""


def test_bad_ids():
    for bad in ("", "a.b", "a b", "-a", "x" * 65):
        with pytest.raises(ValueError, match="letters"):
            new_key(bad)
