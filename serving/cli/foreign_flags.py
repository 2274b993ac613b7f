"""Flags of vLLM, SGLang and LoRAX that this server does not have. No jax.

A command line for these servers means the same here, or is rejected with the reason.
"""

import argparse
import copy
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from serving.cli.foreign_reasons import (
    ALWAYS_SO,
    HARMLESS_OBJECTS,
    OLDER_ALWAYS_SO,
    OLDER_REFUSED,
    OLDER_SPELLINGS,
    OLDER_SWITCHES,
    REFUSED,
)
from serving.cli.peer_reasons import PEER_ALWAYS_SO, PEER_REFUSED, PEER_SPELLINGS, PEER_SWITCHES

FACTS = Path(__file__).parent / "vllm_flags.json"
_NOTHING = ("", "{}", "[]", "null", "none")  # values that ask for nothing


@dataclasses.dataclass(frozen=True)
class Fact:
    """One flag of vLLM's parser; `kind` is switch, pair, value, maybe, list or json."""

    flag: str
    kind: str
    aliases: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()  # the other form of a pair
    default: bool | int | float | str | None = None  # None: it has none, or no plain one

    @property
    def positive(self) -> tuple[str, ...]:
        return self.flag, *self.aliases


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Meaning here of a foreign flag."""

    reason: str
    accepted: tuple[str, ...]  # forms of a switch, or values; "*" is any
    so: bool  # asks for what is always so; else it is rejected


@functools.cache
def vllm_facts() -> tuple[Fact, ...]:
    """Return the flags of vLLM's parser in its own order."""
    rows: list[dict[str, Any]] = json.loads(FACTS.read_text(encoding="utf-8"))["flags"]
    return tuple(_fact(row) for row in rows)


def _fact(row: dict[str, Any]) -> Fact:
    aliases, negative = (tuple(row.get(key, ())) for key in ("aliases", "negative"))
    return Fact(row["flag"], row["kind"], aliases, negative, row.get("default"))


@functools.cache
def vllm_source() -> str:
    """Return whose parser and which release the facts are of."""
    return json.loads(FACTS.read_text(encoding="utf-8"))["source"]


def verdict(fact: Fact) -> Verdict | None:
    """Return what a flag without a flag of ours means here, None where the tables do not say."""
    always, refused = _tables()
    for form in (*fact.positive, *fact.negative):
        if form in always:
            values, reason = always[form]
            if fact.kind in ("pair", "switch"):
                return Verdict(reason, _side(fact, form), so=True)
            return Verdict(reason, values, so=True)
        if form in refused:
            return Verdict(refused[form], _harmless(fact, form), so=False)
    return None


@functools.cache
def _tables() -> tuple[dict[str, tuple[tuple[str, ...], str]], dict[str, str]]:
    """Return what is always so (form: values and reason) and what is refused (form: reason)."""
    always = {}
    for key, reason in (ALWAYS_SO | OLDER_ALWAYS_SO | PEER_ALWAYS_SO).items():
        form, *values = key.split()
        always[form] = tuple(values), reason
    refused = _by_form(REFUSED) | _by_form(OLDER_REFUSED) | _by_form(PEER_REFUSED)
    return always, refused


def _by_form(reasons: dict[str, str]) -> dict[str, str]:
    return {form: reason for reason, forms in reasons.items() for form in forms.split()}


def _side(fact: Fact, form: str) -> tuple[str, ...]:
    return fact.positive if form in fact.positive else fact.negative


def _harmless(fact: Fact, form: str) -> tuple[str, ...]:
    """Return the forms or values of a refused flag that do not ask for it."""
    if fact.kind in ("pair", "switch"):
        return fact.negative if form in fact.positive else fact.positive
    default = () if fact.default in (None, "") else (str(fact.default),)
    return default + HARMLESS_OBJECTS.get(form, ())


def _older_facts() -> list[Fact]:
    """Return the flags that only older releases, SGLang and LoRAX have."""
    rows = [_older(*key.split()) for key in (*OLDER_ALWAYS_SO, *PEER_ALWAYS_SO)]
    refused = _by_form(OLDER_REFUSED) | _by_form(PEER_REFUSED)
    switches = (*OLDER_SWITCHES.split(), *PEER_SWITCHES.split())
    return rows + [Fact(form, "switch" if form in switches else "list") for form in refused]


def _older(flag: str, *values: str) -> Fact:
    return Fact(flag, "value" if values else "switch")


class ForeignFlag(argparse.Action):
    """Accepts what is so anyway, refuses the rest; nothing of it reaches the namespace."""

    positives: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()  # the forms that turn a switch off

    def __init__(self, *args: Any, verdict: Verdict, **more: Any):
        super().__init__(*args, **more)
        self._verdict = verdict

    def __call__(self, parser: Any, namespace, values, option_string=None) -> None:
        accepted, reason = self._verdict.accepted, self._verdict.reason
        if self.nargs == 0:
            if option_string not in accepted:
                parser.refuse(option_string, _to_leave_out(reason))
            return
        text = " ".join(map(str, values)) if isinstance(values, list) else str(values or "")
        if "*" in accepted or text.lower() in _NOTHING or any(_same(text, a) for a in accepted):
            return
        if accepted:
            only = f"only {' or '.join(accepted)} is offered; {reason}"
            parser.refuse(f"{option_string} {text}", only)
        else:
            parser.refuse(option_string, _to_leave_out(reason))


def _to_leave_out(reason: str) -> str:
    """Return the reason with what to do, which those that name another flag say already."""
    return reason if "--" in reason else f"{reason}; leave the flag out"


def _same(text: str, accepted: str) -> bool:
    if accepted.startswith("{"):
        try:
            return json.loads(text) == json.loads(accepted)
        except ValueError:
            return False
    try:
        return float(text) == float(accepted)
    except ValueError:
        return text.lower() == accepted.lower()


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Add each flag of the tables that the parser has not; --help shows those that are so anyway.

    Flags of ours get vLLM's other spellings of them.
    """
    group = parser.add_argument_group(
        f"vLLM flags that change nothing, as the server always behaves so ({vllm_source()})"
    )
    for fact in (*vllm_facts(), *_older_facts()):
        action = parser._option_string_actions.get(fact.flag)
        if action is not None:
            _add_spellings(parser, action, fact)
        elif (answer := verdict(fact)) is not None:
            _add_foreign_flag(group, fact, answer)
    actions = parser._option_string_actions
    for flag, forms in PEER_SPELLINGS.items():
        for form in forms:  # a flag of its own: an error names it
            actions[form] = copy.copy(actions[flag])
            actions[form].option_strings = [form]


def _add_foreign_flag(group: Any, fact: Fact, answer: Verdict) -> None:
    nargs = {"pair": 0, "switch": 0, "list": "*", "maybe": "?"}.get(fact.kind)
    values = "|".join(answer.accepted).replace("*", "ANY") or "VALUE"
    action = group.add_argument(
        *(*fact.positive, *OLDER_SPELLINGS.get(fact.flag, ()), *fact.negative),
        action=ForeignFlag,
        verdict=answer,
        nargs=nargs,
        dest=argparse.SUPPRESS,
        metavar=None if nargs == 0 else values,
        help=answer.reason if answer.so else argparse.SUPPRESS,
    )
    action.positives, action.negatives = fact.positive, fact.negative
    # What --help shows; the parser knows them all.
    action.option_strings = [answer.accepted[0] if answer.so and nargs == 0 else fact.flag]


def _add_spellings(parser: argparse.ArgumentParser, action: argparse.Action, fact: Fact) -> None:
    """Let vLLM's other spellings of a flag of ours do the same."""
    actions = parser._option_string_actions
    for form in (*fact.positive, *OLDER_SPELLINGS.get(fact.flag, ())):
        actions.setdefault(form, action)
    off = next((form for form in action.option_strings if form.startswith("--no-")), None)
    if off is not None:
        for form in fact.negative:
            if form not in actions:
                hidden = argparse.SUPPRESS
                parser.add_argument(form, dest=action.dest, action="store_false", help=hidden)
