"""Names with a version, and games with @ that are none."""

import pytest

from lora_jax.adapters.registry_errors import AdapterRejected
from lora_jax.adapters.versions import FULL_NAME, NAME, check_name, joined, split


def test_a_full_name_has_two_parts():
    assert split("sql@v2") == ("sql", "v2")
    assert split("sql") == ("sql", None)
    assert joined("sql", "v2") == "sql@v2"
    for name in ("sql", "sql@v2", "a.b-c@2026-11-23", "x" * 64 + "@" + "y" * 64):
        check_name(name)
        assert FULL_NAME.fullmatch(name)
    assert not NAME.fullmatch("sql@v2")


GAMES = ["@", "@v1", "sql@", "sql@@v1", "sql@v1@v2", "sql@ v1", "sql@/v1", "sql@..", "sql@\n"]
GAMES += ["sql@" + "v" * 65, "s" * 65 + "@v1", "sql@v1\0", "sql@%40", "sql＠v1"]


@pytest.mark.parametrize("name", GAMES, ids=range(len(GAMES)))
def test_games_with_the_sign_are_refused(name):
    with pytest.raises(AdapterRejected, match="NAME@VERSION"):
        check_name(name)


def test_a_name_is_a_text():
    with pytest.raises(AdapterRejected, match="adapter name must be a text, got int"):
        check_name(5)  # type: ignore[arg-type]
