"""Grammars of schemas allow valid JSON and nothing else, by the validator `jsonschema`.

Answers are drawn from the masks without a model: random tokens among those allowed. Texts that the
validator refuses must be refused by the grammar too. The official test suite is no part of this
repository: SCHEMA_SUITE=FOLDER names a clone of json-schema-org/JSON-Schema-Test-Suite. Its schemas
that are refused by name are left out.
"""

import copy
import decimal
import json
import os
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from support.cases.grammar_cases import drawn_schema, tokenizer, vocabulary

from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.grammars import GrammarRefused, Grammars

SUITE = os.environ.get("SCHEMA_SUITE", "")
# Formats that the suite lists as optional; hostname is left out: its cases ask for IDNA's tables.
FORMATS = ("date", "date-time", "duration", "email", "ipv4", "ipv6", "time", "uri", "uuid")
LONGEST = 400  # tokens of an answer
LIKES_ENDS = 40  # tokens after which marks that close something are preferred
LATE = frozenset('"}]')


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(vocabulary(), max_kept=4000)
    yield made
    made.close()


def draw(grammar, rng):
    """Return an answer, None for one that does not end in time."""
    matcher, ids, ends = grammar.start(), [], set(vocabulary().end_ids)
    words = vocabulary().tokens
    for count in range(LONGEST):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if not allowed or (ends & set(allowed) and (len(allowed) == len(ends) or count > 5)):
            return tokenizer().decode(ids)
        late = [i for i in allowed if words[i][:1].decode("latin-1") in LATE]
        chosen = rng.choice(late if late and count > LIKES_ENDS else allowed)
        if chosen in ends:
            return tokenizer().decode(ids)
        ids.append(chosen)
        assert matcher.consume_token(chosen), matcher.get_error()
    return None


def accepts(grammar, text):
    matcher, ids = grammar.start(), tokenizer().encode(text, add_special_tokens=False)
    return matcher.validate_tokens(ids) == len(ids) and (
        matcher.consume_tokens(ids) and matcher.is_accepting()
    )


def changed(value, rng):
    """Return the value with one thing changed, which a schema may or may not mind."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        kind = rng.randrange(3)
        if kind == 0:
            del value[name]
        elif kind == 1:
            value["unknown"] = 1
        else:
            value[name] = changed(value[name], rng)
        return value
    if isinstance(value, list) and value:
        return rng.choice([value * 9, [], [changed(value[0], rng), *value[1:]]])
    return rng.choice([None, -10_001, "of another kind", {"a": 1}, [[]], True])


def is_exactly(schema, text):
    """Return whether a text is valid by decimal numbers: 79831.2 is a multiple of 0.0001."""
    given = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
    value = json.loads(text, parse_float=decimal.Decimal)
    return jsonschema.Draft202012Validator(given).is_valid(value)


def check_drawn(grammars, seed):
    """Return how many answers ended, and how many changed ones were invalid."""
    schema, rng = drawn_schema(seed), random.Random(seed)
    grammar = grammars.compile(StructuredOutputs.of({"json": schema}))
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    ended = wrong = 0
    for _ in range(4):
        text = draw(grammar, rng)
        if text is None:
            continue
        value, ended = json.loads(text), ended + 1
        assert is_valid(value), (schema, text)
        for _ in range(4):
            other = changed(value, rng)
            if not is_valid(other):
                wrong += 1
                assert not accepts(grammar, json.dumps(other, ensure_ascii=False)), (schema, other)
    return ended, wrong


def test_drawn_schemas_allow_valid_answers_only(grammars):
    counts = [check_drawn(grammars, seed) for seed in range(12)]
    assert sum(ended for ended, _ in counts) > 30
    assert sum(wrong for _, wrong in counts) > 30


@pytest.mark.long
def test_two_hundred_more(grammars):
    counts = [check_drawn(grammars, seed) for seed in range(12, 212)]
    assert sum(ended for ended, _ in counts) > 600
    assert sum(wrong for _, wrong in counts) > 600


@pytest.mark.long
@pytest.mark.skipif(not SUITE, reason="SCHEMA_SUITE names no clone of JSON-Schema-Test-Suite")
def test_cases_of_draft_2020_12_that_are_supported(grammars):
    drawn = refused = supported = rejected = 0
    faults = []
    folder = Path(SUITE, "tests", "draft2020-12")
    formats = [folder / "optional" / "format" / f"{name}.json" for name in FORMATS]
    for file in [*sorted(folder.glob("*.json")), *formats]:
        for group in json.loads(file.read_text()):
            schema, rng = group["schema"], random.Random(group["description"])
            where = f"{file.stem}: {group['description']}"
            if not isinstance(schema, dict):
                continue
            try:
                grammar = grammars.compile(StructuredOutputs.of({"json": schema}))
            except (GrammarRefused, ValueError):
                refused += 1
                continue
            supported += 1
            validator = jsonschema.Draft202012Validator(schema)
            for case in group["tests"]:
                text = json.dumps(case["data"], ensure_ascii=False)
                if not case["valid"]:
                    rejected += 1
                    if accepts(grammar, text):
                        faults.append((where, "takes", text))
            for _ in range(3):
                text = draw(grammar, rng)
                if text is None:
                    continue
                try:
                    is_valid = validator.is_valid(json.loads(text)) or is_exactly(schema, text)
                except re.error:  # Python's patterns have no \p{...}
                    break
                drawn += 1
                if not is_valid:
                    faults.append((where, "allows", text))
    print(f"{supported} schemas supported, {refused} refused; {drawn} answers drawn, ", end="")
    print(f"{rejected} invalid texts, {len(faults)} faults")
    assert not faults, faults
    assert supported > 100
    assert drawn > supported
