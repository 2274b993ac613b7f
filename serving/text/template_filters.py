"""The filters, tests and methods of texts that a chat template may use, each with its cost.

Jinja's own compute in C, where neither steps nor seconds are counted, and hold the interpreter
lock. Here each counts what it is given before it begins. What is not named here is not there.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Protocol

from jinja2.exceptions import SecurityError

# Work that grows no faster than their text or list, which is counted.
_LINEAR = ("abs", "attr", "capitalize", "count", "d", "default", "e", "escape", "first", "float")
_LINEAR += ("items", "last", "length", "lower", "map", "reject", "rejectattr", "reverse", "safe")
_LINEAR += ("select", "selectattr", "trim", "upper")
_SLOW = ("title", "truncate", "wordcount")  # some 100 ns a character
_ORDERING = ("dictsort", "groupby", "max", "min", "sort", "unique")
_COMPARING = ("eq", "==", "equalto", "ne", "!=", "in", "lt", "<", "lessthan", "le", "<=")
_COMPARING += ("gt", ">", "greaterthan", "ge", ">=")
_MAX_SLOW = 1 << 16  # characters
_MAX_PARTS = 1 << 16  # of a text that is split
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MAX_STRIPPED = 256  # distinct characters that `strip` looks for
_MAX_DIGITS = 64
_MAX_PRECISION = 15
_MAX_NUMBER = 1 << 128
_ENTRY = 8  # an entry of a list counts as so many characters


class AbstractMeter(Protocol):
    """Counter of steps and characters; see `template_sandbox.Meter`."""

    def step(self) -> str: ...

    def build(self, length: int) -> None: ...

    def charge(self, length: int) -> None: ...

    def shown(self, value: Any) -> Any: ...


def bounded_filters(meter: AbstractMeter, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of Jinja's filters that are allowed, bounded by the meter."""
    filters = {name: _counted(meter, given[name]) for name in _LINEAR}
    filters |= {name: _counted(meter, given[name], _MAX_SLOW) for name in _SLOW}
    filters |= {name: _ordering(meter, given[name]) for name in _ORDERING}
    filters["int"] = _checked(given["int"], _check_digits)
    filters["round"] = _checked(given["round"], _check_precision)
    filters["list"] = functools.partial(entries, meter)
    filters["sum"] = functools.partial(_sum, meter)
    return filters


def bounded_tests(meter: AbstractMeter, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Jinja's tests; what they compare is counted first."""

    def comparing(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda left, right: test(meter.shown(left), meter.shown(right))

    return {**given, **{name: comparing(given[name]) for name in _COMPARING}}


def bounded_method(meter: AbstractMeter, owner: str, name: str) -> Callable[..., Any]:
    """Return a method of a text that counts what it takes."""
    method = getattr(owner, name)
    meter.build(len(owner))
    if name in ("split", "rsplit"):
        return functools.partial(_split, method)
    if name == "splitlines" and sum(map(owner.count, _LINE_ENDS)) > _MAX_PARTS:
        raise SecurityError("a text is split into too many lines")
    if name in ("strip", "lstrip", "rstrip"):
        return functools.partial(_strip, method)
    return method


def entries(meter: AbstractMeter, value: Iterable[Any]) -> list[Any]:
    """Return a list of what is in the value, each entry a step."""
    if isinstance(value, Sized):
        meter.build(len(value) * _ENTRY)
        return list(value)
    items = []
    for item in value:
        meter.step()
        items.append(item)
    return items


def check_number(value: Any) -> None:
    """Raise SecurityError for a whole number so large that computing with it takes time."""
    if isinstance(value, int) and abs(value) >= _MAX_NUMBER**32:
        raise SecurityError("a number is too large")


def _counted(
    meter: AbstractMeter, function: Callable[..., Any], most: int | None = None
) -> Callable[..., Any]:
    """Return the filter; a text that goes in or comes out is counted, at most `most` goes in."""
    index = _place(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value = args[index]
        if isinstance(value, str):
            meter.build(len(value))
            if most is not None and len(value) > most:
                raise SecurityError(f"a filter takes texts of at most {most} characters")
        elif most is not None:
            meter.shown(value)
        else:
            meter.step()
        result = function(*args, **kwargs)
        if isinstance(result, str):
            meter.build(len(result))
        return result

    return run


def _ordering(meter: AbstractMeter, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that compares entries; as many are counted as it may compare."""
    index = _place(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value = args[index]
        if not isinstance(value, Mapping):
            value = entries(meter, value)
        meter.shown(value)
        rounds = len(value).bit_length()
        meter.charge(rounds * sum(len(v) for v in value if isinstance(v, str)))
        for _ in range(len(value) * rounds // 8):  # an entry's comparison is short
            meter.step()
        return function(*args[:index], value, *args[index + 1 :], **kwargs)

    return run


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def _check_digits(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise SecurityError(f"a number is read from at most {_MAX_DIGITS} characters")


def _check_precision(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    check_number(value)
    if not (isinstance(precision, int) and abs(precision) <= _MAX_PRECISION):
        raise SecurityError(f"a precision must be in [-{_MAX_PRECISION}, {_MAX_PRECISION}]")


def _sum(
    meter: AbstractMeter, value: Iterable[Any], attribute: str | None = None, start: Any = 0
) -> Any:
    """Return the sum of numbers; adding up lists would take the square of their length."""
    total = start
    for item in entries(meter, value):
        meter.step()
        if attribute is not None:
            item = item[attribute] if isinstance(item, Mapping) else None
        if not all(isinstance(n, int | float) for n in (item, total)):
            raise SecurityError("sum adds numbers only")
        check_number(total)
        total += item
    return total


def _split(method: Callable[..., list[str]], sep: str | None = None, maxsplit: int = -1) -> Any:
    parts = method(sep, maxsplit if 0 <= maxsplit < _MAX_PARTS else _MAX_PARTS)
    if len(parts) > _MAX_PARTS:
        raise SecurityError(f"a text is split into more than {_MAX_PARTS} parts")
    return parts


def _strip(method: Callable[..., str], chars: str | None = None) -> str:
    if chars is not None and len(chars) > _MAX_STRIPPED:
        raise SecurityError(f"strip takes at most {_MAX_STRIPPED} characters")
    return method(chars)


def _place(function: Callable[..., Any]) -> int:
    """Return which argument of a filter is its value: Jinja may put another before it."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0
