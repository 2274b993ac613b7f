"""The fake engine of these tests offers what the interface asks for."""

from support.doubles.fake_engine import FakeEngine

from serving.http.interface import AbstractEngine, AbstractTokenizer


def members(protocol) -> set[str]:
    named = {name for name in vars(protocol) if not name.startswith("_")}
    return named | set(protocol.__annotations__)


def test_fake_engine_is_an_engine():
    engine = FakeEngine()
    assert [name for name in members(AbstractEngine) if not hasattr(engine, name)] == []
    assert [n for n in members(AbstractTokenizer) if not hasattr(engine.tokenizer, n)] == []
