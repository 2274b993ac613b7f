"""Tokenizers of adapters that bring tokens: the base's, with their own added. No jax.

The base has rows to spare for these tokens; its tokenizer does not spell them. Chat templates and
grammars stay the base's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from lora_jax.adapters.added_tokens import AddedToken
from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.weights import AnyWeights
from serving.text.tokenizer import Tokenizer

_KEPT = 64  # tokenizers that are kept; one of a large vocabulary takes a second to make
_Named = Callable[[str, str], AdapterEntry]


class AdapterTokenizers:
    """The tokenizer of each adapter; any thread may ask."""

    def __init__(self, base: Tokenizer, vocab_size: int):
        """`vocab_size` is the number of the model's logits."""
        self._base, self._vocab_size = base, vocab_size
        self._make = functools.lru_cache(_KEPT)(base.with_tokens)
        self._named: _Named | None = None

    def ask(self, named: _Named) -> None:
        """Have `named` tell what an adapter's name and the key of a user stand for."""
        self._named = named

    def of(
        self,
        adapter: AdapterEntry | str | Mapping[str, float] | None,
        session: str | None = None,
    ) -> Tokenizer:
        """Return the tokenizer for an adapter, by its entry or its name.

        The base's is that of the base, of weighted sums, and of names that are not known.
        """
        if isinstance(adapter, str):
            adapter = self._entry(adapter, session or "")
        if adapter is None or isinstance(adapter, Mapping):
            return self._base
        added = adapter.report.added_tokens
        return self._make(added) if added else self._base

    def fitted(self, weights: AnyWeights) -> AnyWeights:
        """Return an adapter whose report has those of its added tokens that the base lacks.

        ValueError naming the token for one that the base's tokenizer cannot be given.
        """
        report = weights.report
        if not report.added_tokens:
            return weights
        added = tuple(token for token in report.added_tokens if self._is_new(token))
        if added:
            self._make(added)
        return dataclasses.replace(weights, report=dataclasses.replace(report, added_tokens=added))

    def _is_new(self, token: AddedToken) -> bool:
        known, number = self._base.token_id(token.content), token.token_id
        if known == number or number is None:
            return False
        shown = f"the adapter's tokenizer: the token {token.content[:64]!r} has the id {number}"
        if known is not None:
            raise ValueError(f"{shown}, in the base's it has {known}.")
        if number >= self._vocab_size:
            raise ValueError(f"{shown}; the base has {self._vocab_size} rows of tokens.")
        (spelled,) = self._base.token_strs([number])
        if spelled:
            raise ValueError(f"{shown}, which is {spelled[:64]!r} in the base's.")
        return True

    def _entry(self, name: str, session: str) -> AdapterEntry | None:
        try:
            return None if self._named is None else self._named(name, session)
        except (KeyError, ValueError):  # who asks for its answer is told
            return None
