"""The checker of histories accepts the good ones and names what is wrong with the bad ones."""

import re

import pytest
from fault_checker import violations
from fault_history import ANSWERED, CUT, REFUSED, SILENT, TOLD, Fault, Operation

ANSWERS = {
    ("base", 0): (1, 2, 3),
    ("law", 0): (4, 5, 6),
    ("sql", 0): (4, 8, 9),
}
FIXED = {"base": "base", "fixed": "law"}
KILL = Fault("kill", "instance 0", 10.0, 10.0, 25.0)
FRONT = Fault("restart", "front", 10.0, 20.0, 30.0)


def ask(name, tokens=(), start=0.0, end=0.5, outcome=ANSWERED, status=200):
    return Operation("ask", name, start, end, outcome, status, tokens=tuple(tokens))


def missing(name, start=0.0):
    return ask(name, start=start, end=start + 0.5, outcome=TOLD, status=404)


def load(name, folder, start=0.0, end=0.5, outcome=ANSWERED, status=200):
    return Operation("load", name, start, end, outcome, status, content=folder)


def unload(name, start=0.0, end=0.5, outcome=ANSWERED, status=200):
    return Operation("unload", name, start, end, outcome, status)


def check(*operations, faults=()):
    return violations(operations, list(faults), ANSWERS, FIXED, service_s=1.0)


GOOD = {
    "an answer of the base": [ask("base", (1, 2, 3))],
    "the beginning of an answer": [ask("base", (1, 2))],
    "a fixed adapter": [ask("fixed", (4, 5))],
    "a name that was never loaded": [missing("mine")],
    "read what was loaded": [load("mine", "law"), ask("mine", (4, 5, 6), start=1, end=2)],
    "absent after the unload": [
        load("mine", "law"),
        unload("mine", start=1, end=2),
        missing("mine", start=3),
    ],
    "old while the new is being loaded": [
        load("mine", "law"),
        load("mine", "sql", start=1, end=2),
        ask("mine", (4, 5), start=1.5, end=2.4),
    ],
    "new while it is being loaded": [
        load("mine", "law", start=1, end=2),
        ask("mine", (4, 5), start=1.5, end=1.8),
    ],
    "a load that failed may have taken effect": [
        load("mine", "law", start=9, end=10.5, outcome=TOLD, status=503),
        ask("mine", (4, 5), start=11, end=12),
    ],
    "a load that failed may have had no effect": [
        load("mine", "law", start=9, end=10.5, outcome=TOLD, status=503),
        missing("mine", start=11),
    ],
    "told within three seconds": [ask("base", start=9, end=13.5, outcome=TOLD, status=503)],
    "refused while a role is away": [ask("base", start=20, end=20.1, outcome=TOLD, status=503)],
}
BAD = {
    "another's answer": ([ask("base", (4, 5, 6))], "wrong answer: it is that of .'law'."),
    "an answer of nobody": ([ask("base", (7, 7))], "nothing known"),
    "an answer without tokens": ([ask("base", ())], "wrong answer"),
    "a fixed adapter is gone": ([missing("fixed")], "acknowledged load is lost"),
    "a load is lost": ([load("mine", "law"), missing("mine", start=1)], "must be law"),
    "an unload finds nothing": (
        [load("mine", "law"), unload("mine", start=1, end=2, outcome=TOLD, status=404)],
        "acknowledged load is lost",
    ),
    "stale after a reload": (
        [load("mine", "law"), load("mine", "sql", start=1, end=2), ask("mine", (4, 5), 3, 4)],
        "not of sql",
    ),
    "there after an unload": (
        [load("mine", "law"), unload("mine", 1, 2), ask("mine", (4, 5), 3, 4)],
        "not of None",
    ),
    "a failed load is replaced by one that was acknowledged": (
        [
            load("mine", "law", 9, 10.5, TOLD, 503),
            load("mine", "sql", 11, 12),
            ask("mine", (4, 5), 13, 14),
        ],
        "not of sql",
    ),
    "a load of a folder that is there": (
        [load("mine", "law", outcome=TOLD, status=404)],
        "the folder is there",
    ),
    "told too late": ([ask("base", start=9, end=14.5, outcome=TOLD, status=503)], "0.5 s too late"),
    "answered too late": ([ask("base", (1,), start=30, end=31.5)], "0.5 s too late"),
    "never answered": ([ask("base", start=9, end=10, outcome=SILENT)], "no answer at all"),
    "a stream that just ends": ([ask("base", start=9, end=11, outcome=CUT)], "without a status"),
    "an error without a fault": (
        [ask("base", start=1, end=2, outcome=TOLD, status=503)],
        "without a fault",
    ),
    "an error long after the recovery": (
        [ask("base", start=27, end=27.1, outcome=TOLD, status=503)],
        "without a fault",
    ),
    "a fault told as a mistake": (
        [ask("base", start=11, end=11.1, outcome=TOLD, status=400)],
        "client's mistake",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_histories_are_accepted(name):
    assert check(*GOOD[name], faults=[KILL]) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_named(name):
    operations, said = BAD[name]
    found = check(*operations, faults=[KILL])
    assert len(found) == 1
    assert re.search(said, found[0]), found


def test_connections_may_end_with_the_front():
    cut = ask("base", start=9, end=10.1, outcome=CUT)
    assert check(cut, faults=[FRONT]) == []
    assert check(cut, faults=[KILL])


def test_what_nobody_heard_has_no_effect():
    loaded = load("mine", "law")
    refused = load("mine", "sql", start=11, end=11, outcome=REFUSED, status=0)
    right, stale = ask("mine", (4, 5), 31, 32), ask("mine", (4, 8), 31, 32)
    assert check(loaded, refused, right, faults=[FRONT]) == []
    assert "not of law" in check(loaded, refused, stale, faults=[FRONT])[0]
    assert "nobody listened" in check(loaded, refused, right, faults=[KILL])[0]


def test_requests_may_wait_while_the_front_is_stopped():
    slow = ask("base", (1, 2), start=11, end=23.5)
    assert check(slow, faults=[FRONT]) == []
    assert check(slow, faults=[KILL])


def test_a_history_is_judged_in_any_order():
    history = [missing("mine", start=1), load("mine", "law")]
    assert check(*history) == check(*reversed(history)) != []
