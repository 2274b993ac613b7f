"""Grammar texts for llguidance: each kind of structure as the set of answers that it allows."""

import json
import re
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.lark_options import checked_lark
from serving.text.structured.real_dates import with_real_dates

# A space, or a line break with an indent: a model that is unsure may write blanks without end.
WHITESPACE = r"\x20|\r?\n(\x20{0,32}|\t{0,8})"
MAX_TAGS = 256
_GBNF = re.compile(r"^[ \t]*[\w-]++[ \t]*+::=", re.MULTILINE)  # a rule; Lark has a colon alone

# The model chooses the tokens of a text that the grammar leaves no choice of. Otherwise the library
# asks Python for the tokens of such a text and allows no others: a call within many masks, which
# needs the interpreter's lock.
OPTIONS = '%llguidance {"no_forcing": true}\n'


# Of StructuredOutputs.thoughts. The tags are text: a tokenizer may have tokens for them or not.
# Few blanks, as above.
_BEFORE = {
    "opened": "start: thoughts SPACES @structure",
    "optional": "start: (OPEN thoughts SPACES)? @structure",
    "always": "start: OPEN? thoughts SPACES @structure",
}
_THOUGHTS = r"""
thoughts[lazy]: THOUGHTS
OPEN: "<think>"
THOUGHTS: /(?s:.*)<\/think>/
SPACES: /[ \t\r\n]{0,4}/
"""


def grammar_text(outputs: StructuredOutputs) -> str:
    """Return llguidance's grammar; ValueError for a structure that does not say one.

    It allows each token with which some answer may go on. Whether llguidance takes it is another
    question: see `checker`.
    """
    text = _text(outputs)
    if outputs.thoughts:
        return _after_thoughts(text, _BEFORE[outputs.thoughts])
    if not text.startswith("{"):
        return f"{text}\n{OPTIONS}"  # behind it, so that errors name the client's own lines
    (bound,) = json.loads(text)["grammars"]  # Lark alone has options, and sets them for all
    start = {"name": "start", "lark_grammar": f"{OPTIONS}start: @{bound['name']}"}
    return json.dumps({"grammars": [start, bound]})


def _after_thoughts(text: str, start: str) -> str:
    """Return the grammar of answers that begin as the rule `start` says."""
    bound = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    first = {"name": "start", "lark_grammar": f"{OPTIONS}{start}{_THOUGHTS}"}
    return json.dumps({"grammars": [first, {**bound, "name": "structure"}]})


def _text(outputs: StructuredOutputs) -> str:
    if outputs.kind in ("json", "json_object"):
        return _of_schema(outputs.text, _json_options(outputs))
    if outputs.kind == "regex":
        return LLMatcher.grammar_from_regex(outputs.text)
    if outputs.kind == "choice":
        items = (json.dumps(item, ensure_ascii=False) for item in json.loads(outputs.text))
        # One terminal: as rules thousands of choices would be too many for one row of a parse.
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(items)}")
    if outputs.kind == "grammar":
        lark = checked_lark(_as_lark(outputs.text), _json_options(outputs))
        return LLMatcher.grammar_from_lark(lark)
    tags = _of_tags(json.loads(outputs.text), _json_options(outputs))
    return LLMatcher.grammar_from_lark(tags)


def _json_options(outputs: StructuredOutputs) -> dict[str, Any]:
    """Return the options of JSON, which nothing inside the schema may change."""
    pattern = outputs.whitespace_pattern or WHITESPACE
    spaces = {} if outputs.disable_any_whitespace else {"whitespace_pattern": pattern}
    return {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": not outputs.disable_any_whitespace,
        **spaces,
    }


def _of_schema(schema: str, options: Any) -> str:
    schema = json.dumps(with_real_dates(json.loads(schema)))
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _as_lark(text: str) -> str:
    if not _GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises plain ones too
        raise ValueError(f"structured_outputs.grammar: {str(error)[:300]}") from None


def _of_tags(value: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the grammar of vLLM's tags: free text in which each trigger begins a structure."""
    unknown = value.keys() - {"type", "structures", "triggers"}
    if unknown:
        raise ValueError(
            f"structural_tag.{min(unknown)[:60]} is not supported; there are structures and "
            "triggers."
        )
    structures, triggers = (_objects(value, name) for name in ("structures", "triggers"))
    tags = []
    for index, structure in enumerate(structures):
        where = f"structural_tag.structures.{index}"
        if not isinstance(structure, Mapping):
            raise ValueError(f"{where} must be an object with begin, schema and end.")
        begin, end, schema = (structure.get(name) for name in ("begin", "end", "schema"))
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"{where}.begin and .end must be texts.")
        if not isinstance(schema, Mapping):
            raise ValueError(f"{where}.schema must be an object.")
        names = (t for t in triggers if isinstance(t, str) and t)
        trigger = next((t for t in names if begin.startswith(t)), "")
        if not trigger:
            raise ValueError(f"{where}.begin starts with none of the triggers.")
        bound = {**with_real_dates(schema), "x-guidance": options}
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=bound, end=end))
    return StructTag.to_grammar(tags, assume_special=False)


def _objects(value: dict[str, Any], name: str) -> list[Any]:
    given = value.get(name)
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_TAGS:
        raise ValueError(f"structural_tag.{name} must be a list of 1 to {MAX_TAGS} entries.")
    return given
