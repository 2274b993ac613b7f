"""Keys of the prompts of a call: a rollout chooses the version of each by its key. No jax.

A prompt becomes tokens by the tokenizer of its version, and is handed in after that. Both ask for
the version by one key, also where the caller gave none.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from serving.engine.inputs.generate_arguments import Adapter
from serving.text.tokenizer import Tokenizer

Session = str | Sequence[str] | None  # of all prompts of a call, or one for each


def new_key() -> str:
    """Return a key that nobody has had."""
    return os.urandom(12).hex()


def keys_of(session: Session, count: int) -> list[str]:
    """Return the key of each of `count` prompts, a new one where the caller gave none.

    Raises TypeError for what is no text or texts, ValueError for another number of them.
    """
    if session is None or isinstance(session, str):
        return [session or new_key() for _ in range(count)]
    keys = _listed(session)
    if len(keys) != count:
        raise ValueError(f"{len(keys)} sessions for {count} prompts; give one, or one for each.")
    return [key or new_key() for key in keys]


def _listed(session: Any) -> list[str]:
    """Return the sessions of several prompts. Raises TypeError for what is no text or texts."""
    keys: list[Any] = list(session) if isinstance(session, Sequence) else [session]
    if not all(isinstance(key, str) for key in keys):
        raise TypeError(f"session must be a text, or one for each prompt, got {session!r:.80}.")
    return keys


class KeyedTokenizers:
    """The tokenizers of the prompts of a call, and the key of each, in the order of the calls."""

    def __init__(self, tokenizer_of: Callable[[Adapter, str], Tokenizer], session: Session):
        """`tokenizer_of` tells the one of an adapter's name and a key. Raises TypeError."""
        self._tokenizer_of = tokenizer_of
        one = session is None or isinstance(session, str)
        self._session: Session = session if one else _listed(session)
        self.keys: list[str] = []

    def __call__(self, adapter: Adapter) -> Tokenizer:
        """Return the tokenizer of the next prompt."""
        if self._session is None or isinstance(self._session, str):
            (key,) = keys_of(self._session, 1)
        else:  # too few of them are refused where all prompts are known
            key = next(iter(self._session[len(self.keys) :]), "")
        self.keys.append(key)
        return self._tokenizer_of(adapter, key)
