"""Grammars are compiled once, kept within bounds, and refusals are remembered."""

import sys
import threading

import pytest
from support.cases.grammar_cases import vocabulary

from serving.api.request import EngineDead, QueueFull
from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.checker import Checked, GrammarRefused
from serving.text.structured.grammar_text import grammar_text
from serving.text.structured.grammars import Grammars


class Counting:
    """A checker in this process that counts, and waits where it is told to."""

    def __init__(self):
        self.asked, self.gate, self.inside = [], threading.Event(), threading.Semaphore(0)
        self.gate.set()
        self.size = 10

    def check(self, outputs):
        self.asked.append(outputs.text)
        self.inside.release()
        self.gate.wait()
        if "bad" in outputs.text:
            raise GrammarRefused("no")
        return Checked(grammar_text(outputs), self.size)

    def close(self):
        pass


@pytest.fixture
def made():
    def make(**bounds):
        grammars = Grammars(vocabulary(), **bounds)
        grammars._checker.close()
        grammars._checker = Counting()
        return grammars, grammars._checker

    return make


def regex(text):
    return StructuredOutputs(regex=text)


def test_one_structure_is_compiled_once_and_each_answer_has_its_own_matcher(made):
    grammars, checker = made()
    one = grammars.compile(regex("ab"))
    assert grammars.compile(regex("ab")) is one is grammars.find(regex("ab"))
    assert checker.asked == ["ab"]
    first, second = one.start(), one.start()
    (token,) = [i for i, t in enumerate(vocabulary().tokens) if t == b"a"]
    assert first.consume_token(token)
    assert first.compute_bitmask() != second.compute_bitmask()


def test_one_that_many_ask_for_is_compiled_for_several_rows_at_a_time(made, monkeypatch):
    monkeypatch.setattr("serving.text.structured.grammars._QUICK_S", 60.0)
    monkeypatch.setattr("serving.text.structured.grammars.MOST_COMPILED", 8)
    grammars, checker = made(max_bytes=50)
    one = grammars.compile(regex("ab+"))
    for _ in range(20):
        assert grammars.compile(regex("ab+")) is one
    assert checker.asked == ["ab+"]
    assert one.num_compiled == 5  # of 8, by the bound of bytes
    assert (grammars.num_bytes, one.bytes) == (50, 50)
    masks = {one.start().compute_bitmask() for _ in range(12)}
    assert len(masks) == 1
    monkeypatch.setattr("serving.text.structured.grammars._QUICK_S", 0.0)
    slow = grammars.compile(regex("x"))
    for _ in range(9):
        grammars.compile(regex("x"))
    assert slow.num_compiled == 1


def test_a_refusal_is_remembered(made):
    grammars, checker = made()
    assert grammars.find(regex("bad")) is None
    for _ in range(3):
        with pytest.raises(GrammarRefused):
            grammars.compile(regex("bad"))
    with pytest.raises(GrammarRefused):
        grammars.find(regex("bad"))
    assert checker.asked == ["bad"]


def test_those_used_longest_ago_go_first(made):
    grammars, checker = made(max_bytes=35)
    for text in ("a", "b", "c", "a", "d"):
        grammars.compile(regex(text))
    assert len(grammars) == 3
    assert grammars.num_bytes == 30
    assert grammars.find(regex("b")) is None
    assert grammars.find(regex("a"))
    checker.size = 100  # larger than all room: serves its request and is not kept
    assert grammars.compile(regex("e")).start()
    assert (len(grammars), grammars.num_bytes) == (0, 0)


def test_their_number_is_bounded_too(made):
    grammars, _ = made(max_kept=2)
    for text in ("a", "b", "c"):
        grammars.compile(regex(text))
    assert len(grammars) == 2


def test_many_that_wait_are_turned_away(made):
    grammars, checker = made(max_waiting=1)
    checker.gate.clear()
    thread = threading.Thread(target=grammars.compile, args=(regex("a"),))
    thread.start()
    checker.inside.acquire()
    with pytest.raises(QueueFull):
        grammars.compile(regex("b"))
    checker.gate.set()
    thread.join()
    assert grammars.compile(regex("b"))


def test_a_model_without_an_end_token_has_none():
    with pytest.raises(GrammarRefused, match="end token"):
        Grammars(None).compile(regex("a"))
    with pytest.raises(GrammarRefused, match="are off"):
        Grammars(None, why_none="structured_outputs are off.").compile(regex("a"))


def test_without_the_library_they_are_refused_and_nothing_else(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarRefused, match="llguidance"):
        Grammars(vocabulary()).compile(regex("a"))


def test_a_closed_one_is_a_dead_engine():
    grammars = Grammars(vocabulary())
    grammars.close()
    with pytest.raises(EngineDead):
        grammars.compile(regex("a"))
