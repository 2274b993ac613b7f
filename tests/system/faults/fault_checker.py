"""Judges a history: wrong answers, lost loads, silence, and trouble without a fault.

A name is a register with one writer: a load writes a folder, an unload writes "absent". A write
that was not acknowledged may or may not have taken effect, until the next one that was.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence

from fault_history import ABSENT, ANSWERED, CUT, REFUSED, SILENT, TOLD, Fault, Operation

TELL_S = 3.0  # from a fault to the end of every request that it harms
CALM_S = 1.0  # after the recovery, errors may still be under way

Answers = Mapping[tuple[str | None, int], Sequence[int]]


def violations(
    operations: Iterable[Operation],
    faults: Sequence[Fault],
    answers: Answers,
    fixed: Mapping[str, str],
    service_s: float,
) -> list[str]:
    """Return what is wrong with a history, in words; nothing when it is right.

    `answers` are the tokens by content and prompt, as one process gives them; `fixed` are the
    contents of the names that nobody writes; `service_s` is how long a request may take alone.
    """
    ordered = sorted(operations, key=lambda operation: operation.start_s)
    writes: dict[str, list[Operation]] = {}
    for operation in ordered:
        if operation.kind != "ask" and operation.outcome != REFUSED:
            writes.setdefault(operation.name, []).append(operation)
    found = []
    for operation in ordered:
        wrong = [
            _late(operation, faults, service_s),
            _trouble(operation, faults),
            _content(operation, writes.get(operation.name, ()), answers, fixed),
        ]
        found += [f"{_shown(operation)}: {text}" for text in wrong if text]
    return found


def _late(operation: Operation, faults: Sequence[Fault], service_s: float) -> str | None:
    limit = operation.start_s
    for fault in faults:
        if fault.start_s <= operation.end_s:
            harm_s = fault.end_s if fault.takes_the_front else fault.start_s
            limit = max(limit, harm_s + TELL_S)
    if operation.outcome == SILENT:
        return "no answer at all"
    if operation.end_s > limit + service_s:
        return f"ended {operation.end_s - limit - service_s:.1f} s too late"
    return None


def _trouble(operation: Operation, faults: Sequence[Fault]) -> str | None:
    """Return why an error is none that a fault explains."""
    touching = [
        fault
        for fault in faults
        if fault.start_s <= operation.end_s and operation.start_s <= fault.recovered_s + CALM_S
    ]
    if not any(fault.takes_the_front for fault in touching):
        if operation.outcome == CUT:
            return f"the connection ended without a status or an error event: {operation.text}"
        if operation.outcome == REFUSED:
            return "nobody listened"
    if operation.outcome == TOLD and operation.status != 404 and not touching:
        return f"status {operation.status} without a fault: {operation.text[:200]}"
    if operation.outcome == TOLD and 400 <= operation.status < 500 and operation.status != 404:
        return f"a fault was told as the client's mistake: {operation.text[:200]}"
    return None


def _content(
    operation: Operation, writes: Sequence[Operation], answers: Answers, fixed: Mapping[str, str]
) -> str | None:
    is_missing = operation.outcome == TOLD and operation.status == 404
    if operation.kind == "load" or (operation.outcome != ANSWERED and not is_missing):
        return "the folder is there" if is_missing else None
    if operation.kind == "unload":
        before = [write for write in writes if write is not operation]
        possible = _possible(operation, before)
        return None if not is_missing or ABSENT in possible else _lost(possible)
    name = operation.name
    possible = {fixed[name]} if name in fixed else _possible(operation, writes)
    if is_missing:
        return None if ABSENT in possible else _lost(possible)
    right = [
        content
        for content in possible - {ABSENT}
        if tuple(answers[content, operation.prompt][: len(operation.tokens)]) == operation.tokens
    ]
    if right and operation.tokens:
        return None
    given = [
        content
        for (content, prompt), tokens in answers.items()
        if prompt == operation.prompt and tuple(tokens[: len(operation.tokens)]) == operation.tokens
    ]
    return f"wrong answer: it is that of {given or 'nothing known'}, not of {_names(possible)}"


def _possible(operation: Operation, writes: Sequence[Operation]) -> set[str | None]:
    """Return the contents that a register may have shown at some moment of the operation.

    A name has one writer, so that its writes are in order of their ends, too.
    """
    ended = bisect.bisect_right(writes, operation.start_s, key=lambda write: write.end_s)
    begun = bisect.bisect_left(writes, operation.end_s, key=lambda write: write.start_s)
    certain = next((n for n in reversed(range(ended)) if writes[n].outcome == ANSWERED), -1)
    found = {_value(write) for write in writes[certain + 1 : begun]}
    return found | {ABSENT if certain < 0 else _value(writes[certain])}


def _value(write: Operation) -> str | None:
    return write.content if write.kind == "load" else ABSENT


def _lost(possible: set[str | None]) -> str:
    return f"an acknowledged load is lost: it must be {_names(possible)}"


def _names(possible: set[str | None]) -> str:
    return " or ".join(sorted(str(content) for content in possible))


def _shown(operation: Operation) -> str:
    took = operation.end_s - operation.start_s
    return (
        f"{operation.kind} {operation.name} at {operation.where}, {operation.start_s:.2f} s "
        f"(+{took:.2f} s, {operation.outcome} {operation.status})"
    )
