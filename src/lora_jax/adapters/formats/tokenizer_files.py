"""Tokens that the tokenizer files of an adapter's folder add to a vocabulary. No jax.

They are read where an adapter brings rows of the vocabulary, since only then a new token means
something. Which of them the base's tokenizer has already is not known here.
"""

from typing import Any

from lora_jax import strict_json
from lora_jax.adapters.added_tokens import AddedToken
from lora_jax.adapters.formats.folder import AdapterFolder

_WHOLE, _CONFIG, _OLDER = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_MOST_BYTES = {_WHOLE: 64 << 20, _CONFIG: 4 << 20, _OLDER: 4 << 20}
_MOST_VALUES = 1 << 21  # of a file's JSON: a vocabulary of 250,000 tokens with its merges
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


def read_added(folder: AdapterFolder) -> tuple[AddedToken, ...]:
    """Return the added tokens of a folder's tokenizer files in the order of their ids.

    ValueError naming the file for one that cannot be read, and the token for one of two ids.
    """
    names, tokens = folder.files(), {}
    for file in (name for name in _MOST_BYTES if name in names):
        try:
            values = strict_json.read_object(folder.read(file, _MOST_BYTES[file]), _MOST_VALUES)
            for token in _tokens(file, values):
                known = tokens.setdefault(token.content, token)
                if known.token_id != token.token_id:
                    ids = f"{known.token_id} and {token.token_id}"
                    raise ValueError(f"the token {token.content[:64]!r} has the ids {ids}.")
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return tuple(sorted(tokens.values(), key=lambda token: token.token_id))


def _tokens(file: str, values: dict[str, Any]) -> list[AddedToken]:
    """Return the added tokens of one file, each with its id."""
    if file == _OLDER:  # special_tokens_map.json may say more; its tokens were trained as words
        return [_token({"content": text}, number) for text, number in values.items()]
    if file == _CONFIG:
        listed = values.get("added_tokens_decoder") or {}
        if not isinstance(listed, dict):
            raise ValueError("added_tokens_decoder must map ids to tokens.")
        return [_token(entry, number) for number, entry in listed.items()]
    listed = values.get("added_tokens") or []
    if not isinstance(listed, list):
        raise ValueError("added_tokens must be a list.")
    return [_token(entry, entry.get("id") if isinstance(entry, dict) else None) for entry in listed]


def _token(entry: Any, number: Any) -> AddedToken:
    content = entry.get("content") if isinstance(entry, dict) else None
    if isinstance(number, str) and number.isascii() and number.isdecimal():
        number = int(number[:10])
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"an added token has the id {str(number)[:20]!r}.")
    if not isinstance(content, str) or not content:
        raise ValueError(f"the added token {number} has no text.")
    flags = {flag: bool(entry.get(flag, False)) for flag in _FLAGS}
    return AddedToken(content, number, **flags)
