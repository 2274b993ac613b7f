"""Errors say what to do, and which of them may pass."""

from lora_jax.adapters.registry_errors import AdapterNotFound, AdapterRejected, RegistryBusy


def test_busy_is_a_refusal_with_a_time():
    busy = RegistryBusy("No room.", 3.0, of_key=True)
    assert isinstance(busy, AdapterRejected)
    assert (busy.retry_after_s, busy.of_key, str(busy)) == (3.0, True, "No room.")
    about = busy.about("x")
    assert (about.retry_after_s, about.of_key, str(about)) == (3.0, True, "Adapter 'x': No room.")
    assert str(AdapterRejected("Bad.").about("x")) == "Adapter 'x': Bad."


def test_not_found_names_what_is_known_or_why():
    assert "Known: a, b. load_adapter(" in str(AdapterNotFound("x", ("a", "b")))
    many = tuple(f"a{number:03}" for number in range(1000))
    assert "a018, a019 and 980 more. load_adapter(" in str(AdapterNotFound("x", many))
    assert str(AdapterNotFound("x", (), "gone")) == "The adapter 'x' was not found: gone"
