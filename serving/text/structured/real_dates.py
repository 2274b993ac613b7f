"""Dates and times of schemas as they exist: llguidance's formats take February 29 of any year."""

from collections.abc import Mapping
from typing import Any

from serving.api.structured_outputs import LONE_BACKSLASH, ends_in_escape

_LEAP_YEAR = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"  # as 2024, 2000
)
_DATE = (
    "(?:[0-9]{4}-(?:0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-(?:[01][0-9]|2[0-8])"
    f"|{_LEAP_YEAR}-02-29)"
)
# No leap seconds: which there were is in no pattern, and most readers take none.
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9].*"
# The format itself has the rest, such as the days of April.
_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt ]{_TIME}$",
    "time": f"^{_TIME}$",
}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties")


def with_real_dates(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose formats date, date-time and time allow those alone that exist.

    Each of them gets a pattern beside it. What is no schema, such as an enum, stays as it is.
    Raises ValueError for a pattern of which llguidance would drop the end.
    """
    new = dict(schema)
    _check_patterns(new)
    for name in _BY_NAME:
        if isinstance(inner := new.get(name), Mapping):
            new[name] = {key: _inner(value) for key, value in inner.items()}
    for name in _LISTED:
        if isinstance(inner := new.get(name), list | tuple):
            new[name] = [_inner(value) for value in inner]
    for name in _SINGLE:
        if name in new:
            new[name] = _inner(new[name])
    kind = new.get("format")
    pattern = _PATTERNS.get(kind) if isinstance(kind, str) else None
    if pattern and "pattern" not in new:
        new["pattern"] = pattern
    elif pattern:
        others = new.get("allOf", ())
        new["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": pattern}]
    return new


def _check_patterns(schema: Mapping[str, Any]) -> None:
    names = schema.get("patternProperties")
    names = names if isinstance(names, Mapping) else ()
    for field, given in (("pattern", [schema.get("pattern")]), ("patternProperties", names)):
        for regex in given:
            if isinstance(regex, str) and ends_in_escape(regex):
                raise ValueError(f"{field} {regex[-40:]!r} {LONE_BACKSLASH}.")


def _inner(value: Any) -> Any:
    return with_real_dates(value) if isinstance(value, Mapping) else value
