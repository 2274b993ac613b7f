"""Hostile structures end in an error in time, and the next one is answered."""

import os
import subprocess
import sys
import time
import types

import pytest
from support.cases.grammar_cases import vocabulary
from support.high_descriptor import high_descriptor

from bench.bad_requests import chained_references, crossed_patterns, nested
from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured import checker as module
from serving.text.structured.checker import Checker, GrammarRefused

LIMIT_S = 1.0


@pytest.fixture(scope="module")
def checker():
    made = Checker(vocabulary(), LIMIT_S)
    yield made
    made.close()


GOOD = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
BOMBS = {
    "patterns whose meet explodes": {"json": crossed_patterns(30)},
    "references that recurse": {"json": chained_references(1500)},
    "rules that recurse": {
        "grammar": "start: r0\n"
        + "".join(f'r{i}: r{i + 1} "x" | "y"\n' for i in range(3000))
        + 'r3000: "z"'
    },
    "a converter that is quadratic": {"grammar": "\n" * 60_000 + "x ::="},
    "powers of repeats": {"regex": "((a{0,1000}){0,1000}){0,1000}b"},
    "four thousand objects": {
        "json": {"anyOf": [{"properties": {f"k{i}": {}}} for i in range(4000)]}
    },
    "a product of choices": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {"const": i}}} for j in range(3)]}
                for i in range(14)
            ]
        }
    },
    "a schema that is itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "a schema elsewhere": {"json": {"$ref": "http://example.com/schema.json"}},
    "lookahead": {"regex": "(?=a)b"},
    "an open bracket": {"regex": "(a"},
}


# Each ends the process, as another does; it takes seconds to start again.
FURTHER = ("a converter that is quadratic", "four thousand objects")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in FURTHER else ()) for n in BOMBS]
)
def test_a_bomb_is_refused_in_time_and_the_next_is_answered(checker, name):
    outputs = StructuredOutputs(**BOMBS[name])
    started = time.monotonic()
    with pytest.raises(GrammarRefused) as caught:
        checker.check(outputs)
    assert time.monotonic() - started < LIMIT_S + 20  # the process may start anew beside others
    assert 10 < len(str(caught.value)) < 700
    assert checker.check(GOOD).text


@pytest.mark.parametrize("keyword", ["not", "uniqueItems", "if", "dependentSchemas", "contains"])
def test_keywords_that_nothing_implements_are_named(checker, keyword):
    schema = {"type": "array", keyword: True if keyword == "uniqueItems" else {"type": "null"}}
    with pytest.raises(GrammarRefused, match=keyword):
        checker.check(StructuredOutputs(json=schema))


@pytest.mark.parametrize(
    "fields",
    [
        {"json": nested(25)},
        {"json": chained_references(60)},
        {"json": {"enum": [f"v{i}" for i in range(10_000)]}},
        {"choice": [f"c{i}" for i in range(10_000)]},
        {"regex": "(a+)+b"},
        {"regex": "(.*a.{1000})"},
        {
            "json": {
                "$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}},
                "$ref": "#/$defs/n",
            }
        },
    ],
)
def test_large_ones_that_are_no_bombs_pass(checker, fields):
    checked = checker.check(StructuredOutputs(**fields))
    assert 0 < checked.bytes < 1 << 28


def test_a_longer_text_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="json must have at most 131072 characters"):
        StructuredOutputs(json={"anyOf": [{"properties": {f"k{i}": {}}} for i in range(10_000)]})


def test_a_closed_checker_says_so():
    made = Checker(vocabulary(), LIMIT_S)
    made.check(GOOD)
    made.close()
    with pytest.raises(EOFError):
        made.check(GOOD)


@pytest.fixture
def scripted(monkeypatch):
    """Return a checker whose process is this script, and the list of its processes."""
    made, popen = [], subprocess.Popen

    def make(script, limit_s=LIMIT_S):
        command, started = [sys.executable, "-S", "-c", script], []

        def start(given, **more):
            started.append(popen(command, **more))
            return started[-1]

        monkeypatch.setattr(module.subprocess, "Popen", start)
        made.append(Checker(vocabulary(), limit_s))
        return made[-1], started

    yield make
    for one in made:
        one.close()


READY = "print('{}', flush=True); input(); "


def test_a_process_that_ends_or_is_silent_refuses_the_structure_and_another_one_starts(scripted):
    # It ends with the first question.
    checker, started = scripted(READY + "input()", limit_s=60.0)
    for number in (1, 2):
        with pytest.raises(GrammarRefused, match="too large or too deeply nested to compile"):
            checker.check(GOOD)
        assert len(started) == number
    slow, started = scripted(READY + "input(); input()", limit_s=0.2)
    with pytest.raises(GrammarRefused, match=r"longer than 0.2 s to compile"):
        slow.check(GOOD)
    (process,) = started
    assert process.poll() is not None  # it compiles no longer


def test_a_process_that_does_not_start_is_an_error_of_the_server(scripted):
    checker, _ = scripted("raise SystemExit")
    with pytest.raises(RuntimeError, match="that checks grammars does not start"):
        checker.check(GOOD)


def test_an_answer_is_read_in_a_process_with_many_descriptors():
    """Before: a first schema at more than a thousand connections was called too large."""
    read, write = os.pipe()
    os.write(write, b"{}\n")
    with high_descriptor(read) as high, os.fdopen(high, "rb") as answers:
        process = types.SimpleNamespace(stdout=answers)
        line = Checker(vocabulary(), LIMIT_S)._line(process, time.monotonic() + 60)
    assert line == b"{}"
    os.close(write)


def test_thoughts_before_a_structure_reach_the_process(checker):
    text = checker.check(StructuredOutputs(regex="a", thoughts="opened")).text
    assert "thoughts SPACES @structure" in text
