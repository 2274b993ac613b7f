"""Reader of the small JSON files beside a tokenizer, in all their dialects. No jax."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_jax.adapters.added_tokens import AddedToken
from serving.api.json_file import read_object

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TokenizerFiles:
    """The tokenizer files of one model folder; a file that is not there says nothing."""

    def __init__(self, folder: Path, more: Sequence[AddedToken] = ()):
        """`more` are tokens that no file has, in the order of their ids."""
        if not folder.is_dir():
            raise ValueError(f"There is no model folder {folder.absolute()}.")
        self.folder, self._more = folder, tuple(more)
        self.config = self._read("tokenizer_config.json")

    def has(self, *names: str) -> bool:
        """True if the folder has all of these files."""
        return all((self.folder / name).is_file() for name in names)

    def path(self, name: str) -> str:
        """Return the path of a file of the folder."""
        return str(self.folder / name)

    def special_tokens(self) -> dict[str, str]:
        """Return the spelling of bos_token, eos_token and the others that are set."""
        spelled = self._read("special_tokens_map.json") | self.config
        named = {name: _content(spelled.get(name)) for name in NAMED_TOKENS}
        return {name: content for name, content in named.items() if content is not None}

    def added_tokens(self) -> list[AddedToken]:
        """Return all tokens that the files add to the vocabulary, those with an id first.

        Newer folders have `added_tokens_decoder` (id -> token) in tokenizer_config.json, older
        ones added_tokens.json (content -> id); named special tokens may be in neither.
        """
        tokens: dict[str, AddedToken] = {}
        for token_id, entry in sorted(
            self.config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])
        ):
            tokens[entry["content"]] = _added(entry, int(token_id))
        special = {*self.special_tokens().values(), *self._additional_special_tokens()}
        for content, token_id in sorted(
            self._read("added_tokens.json").items(), key=lambda item: item[1]
        ):
            tokens.setdefault(content, AddedToken(content, token_id, special=content in special))
        for content in sorted(special):
            tokens.setdefault(content, AddedToken(content))
        return [*tokens.values(), *self._more]

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the ids that generation_config.json, or else config.json, ends a text with."""
        for name in ("generation_config.json", "config.json"):
            given = self._read(name).get("eos_token_id")
            ids = given if isinstance(given, list) else [given]
            valid = tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool))
            if valid:
                return valid
        return ()

    def chat_template(self) -> str | None:
        """Return the source of the folder's (default) chat template, if it has one."""
        if self.has("chat_template.jinja"):
            return (self.folder / "chat_template.jinja").read_text(encoding="utf-8")
        template = self._read("chat_template.json").get("chat_template")
        template = template or self.config.get("chat_template")
        if isinstance(template, list):  # [{"name": ..., "template": ...}]
            template = {entry["name"]: entry["template"] for entry in template}
        if isinstance(template, dict):
            template = template.get("default")
        return template or None

    def _additional_special_tokens(self) -> list[str]:
        spelled = self._read("special_tokens_map.json") | self.config
        contents = []
        for field in ("additional_special_tokens", "extra_special_tokens"):
            given = spelled.get(field) or []
            entries = given.values() if isinstance(given, dict) else given
            contents += [content for content in map(_content, entries) if content is not None]
        return contents

    def _read(self, name: str) -> dict[str, Any]:
        return read_object(self.folder / name)


def _content(token: Any) -> str | None:
    """Return the spelling of a token given as a string or as {"content": ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _added(entry: dict[str, Any], token_id: int) -> AddedToken:
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    return AddedToken(
        entry["content"], token_id, **{flag: bool(entry.get(flag, False)) for flag in flags}
    )


def inline_template(given: str | Path) -> str | None:
    r"""Return a template that is no path of one, its \n as line breaks, or None for a path."""
    is_inline = isinstance(given, str) and "{" in given and not os.path.isfile(given)
    return str(given).replace("\\n", "\n") if is_inline else None
