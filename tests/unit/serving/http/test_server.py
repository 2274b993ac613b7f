"""State that the routes share."""

from support.doubles.fake_engine import FakeEngine

from serving.http.server import Server
from serving.http.settings import HttpSettings


def test_names_come_from_the_settings_or_the_engine():
    assert Server.build(FakeEngine(), HttpSettings()).names.base == "fake-base"
    settings = HttpSettings(served_names=("a", "b"))
    assert Server.build(FakeEngine(), settings).names.base == "a"


def test_the_context_is_the_engine_s():
    assert Server.build(FakeEngine(max_model_len=77), HttpSettings()).max_model_len == 77
