"""The engine that texts of an adapter see."""

from types import SimpleNamespace

from support.doubles.fake_engine import FakeEngine

from serving.http.requests.adapter_view import engine_for
from serving.http.requests.bounds import Bounds
from serving.http.requests.model_names import Target


def test_only_the_tokenizer_is_the_adapter_s(monkeypatch):
    engine, own = FakeEngine(max_model_len=9), SimpleNamespace(longest_token=3)
    target = Target("x", "x", SimpleNamespace())
    assert engine_for(engine, target) is engine
    monkeypatch.setattr(engine, "tokenizer_of", lambda entry: own if entry else engine.tokenizer)
    view = engine_for(engine, target)
    assert (view.tokenizer, view.model_info) == (own, engine.model_info)
    assert Bounds.of(view).characters(2) == 6
    assert engine_for(engine, Target("base", None)) is engine
