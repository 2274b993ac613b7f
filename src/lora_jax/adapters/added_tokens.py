"""Tokens that adapters add to a tokenizer. No jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text as a whole; `token_id` None: not said."""

    content: str
    token_id: int | None = None
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
