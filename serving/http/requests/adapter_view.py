"""An engine as requests for one adapter see it: with the tokenizer of that adapter."""

from typing import Any

from serving.http.interface import AbstractEngine
from serving.http.requests.model_names import Target


class AdapterView:
    """The engine, but for its tokenizer."""

    def __init__(self, engine: AbstractEngine, tokenizer: Any):
        self._engine, self.tokenizer = engine, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def engine_for(engine: AbstractEngine, target: Target) -> Any:
    """Return the engine as a target's texts need it; itself where the base's tokenizer does."""
    tokenizer = engine.tokenizer_of(target.entry)
    return engine if tokenizer is engine.tokenizer else AdapterView(engine, tokenizer)
