"""The structure of an answer: vLLM's `structured_outputs`, checked and in one form. No jax."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_GRAMMAR_CHARS = 1 << 17
MAX_JSON_DEPTH = 64
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
# Thoughts before the structure, which end with </think>: none, those that the prompt opens, those
# that <think> opens where there are any, those that need no tag to begin.
NO_THOUGHTS, OPENED, OPTIONAL, ALWAYS = THOUGHTS = ("", "opened", "optional", "always")
LONE_BACKSLASH = "ends with a backslash that escapes nothing: write two for a backslash"


@dataclasses.dataclass(frozen=True)
class StructuredOutputs:
    """One kind of structure, by vLLM's names; a bad value is a ValueError that names the field.

    `json` is a JSON schema (an object or its text), `regex` matches the whole answer, `choice`
    lists the answers, `grammar` is in Lark's or GBNF's syntax, `json_object` is any object, and
    `structural_tag` restricts the text between tags (`structures` and `triggers`). JSON may have
    spaces and line breaks between its parts unless `disable_any_whitespace` is set;
    `whitespace_pattern` is a regex of the allowed white space. `thoughts` is one of THOUGHTS: what
    may come before the structure; no request says so itself.
    """

    json: str | Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    regex: str | None = None
    choice: Sequence[str] | None = dataclasses.field(default=None, hash=False)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    thoughts: str = NO_THOUGHTS
    kind: str = dataclasses.field(init=False, default="")
    text: str = dataclasses.field(init=False, default="")  # of the structure; JSON but for regex
    digest: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have exactly one of {', '.join(KINDS)}, got "
                f"{' and '.join(given) or 'none'}."
            )
        for field, kind in (("disable_any_whitespace", bool), ("whitespace_pattern", str)):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"structured_outputs.{field} must be a {kind.__name__}.")
        if self.thoughts not in THOUGHTS:
            raise ValueError(f"structured_outputs.thoughts must be one of {THOUGHTS}.")
        text = _text_of(given[0], getattr(self, given[0]))
        options = [getattr(self, option) for option in _OPTIONS]
        options += [self.thoughts] if self.thoughts else []
        if len(text) + len(self.whitespace_pattern or "") > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"structured_outputs.{given[0]} must have at most {MAX_GRAMMAR_CHARS} characters, "
                f"got {len(text)}."
            )
        digest = hashlib.sha256(_dumps([given[0], text, options]).encode()).hexdigest()
        for field, value in (("kind", given[0]), ("text", text), ("digest", digest)):
            object.__setattr__(self, field, value)

    @classmethod
    def of(cls, value: object) -> "StructuredOutputs":
        """Return the structure of an object with vLLM's fields, or of one of this class."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("structured_outputs must be an object with one of " + _LISTED)
        fields = {field.name for field in dataclasses.fields(cls) if field.init} - {"thoughts"}
        # Others may say that nothing is asked for, as vLLM's whole object does.
        others = (n for n, item in value.items() if item is not None and item is not False)
        unknown = next((name for name in others if name not in fields), None)
        if unknown is not None:
            shown = f"{unknown!r:.60}"
            raise ValueError(f"structured_outputs.{shown} is not supported; there are {_LISTED}")
        given = {name: item for name, item in value.items() if item is not None and name in fields}
        return cls(**given)


_LISTED = f"{', '.join((*KINDS, *_OPTIONS))}."


def _text_of(kind: str, value: Any) -> str:
    if kind in ("regex", "grammar"):
        text = _checked_text(kind, value)
        if kind == "regex" and ends_in_escape(text):
            raise ValueError(f"structured_outputs.regex {LONE_BACKSLASH}.")
        return text
    if kind == "json_object":
        if value is not True:
            raise ValueError("structured_outputs.json_object must be true.")
        return '{"type":"object"}'
    if kind == "choice":
        return _dumps(_choices(value))
    if isinstance(value, str):
        _checked_text(kind, value)
        if len(value) > MAX_GRAMMAR_CHARS:
            return value  # refused by its length
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise ValueError(f"structured_outputs.{kind} is not valid JSON.") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"structured_outputs.{kind} must be an object, or the text of one.")
    _check_depth(kind, value)
    try:
        return _dumps(value)
    except (TypeError, ValueError):
        raise ValueError(f"structured_outputs.{kind} must hold JSON values only.") from None


def ends_in_escape(regex: str) -> bool:
    """Return whether a regex ends with a backslash that escapes nothing: llguidance drops it."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def _checked_text(kind: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"structured_outputs.{kind} must be a text that is not empty.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"structured_outputs.{kind} must be Unicode text.") from None
    return value


def _choices(value: object) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise ValueError("structured_outputs.choice must be a list of texts that is not empty.")
    for index, item in enumerate(value):
        _checked_text(f"choice.{index}", item)
    return list(value)


def _check_depth(kind: str, value: object) -> None:
    """Raise ValueError for JSON that is nested too deeply, level by level: nothing recurses."""
    level, depth = [value], 0
    while level:
        if depth > MAX_JSON_DEPTH:
            raise ValueError(
                f"structured_outputs.{kind} must be nested at most {MAX_JSON_DEPTH} levels deep."
            )
        depth += 1
        inner: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += item.values()
            elif isinstance(item, list | tuple):
                inner += item
        level = inner


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
