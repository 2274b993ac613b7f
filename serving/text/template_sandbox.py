"""A Jinja environment in which a template cannot run for long, grow large or reach anything.

On top of Jinja's immutable sandbox: every turn of a loop and every call counts against a budget of
steps and of seconds, every operation that can build a long text checks its length first, what is
compared is counted, and only the filters and methods of `template_filters` are there.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.text.template_filters import (
    bounded_filters,
    bounded_method,
    bounded_tests,
    check_number,
    entries,
)

MAX_STEPS = 1_000_000
MAX_SECONDS = 2.0
MAX_LENGTH = 1 << 22  # characters of one text
MAX_TOTAL = 1 << 29  # characters of all texts that one rendering builds
_ENTRY = 8  # an entry of a list counts as so many characters
_MAX_INDENT = 64
_METHODS_LEFT_OUT = ("center", "encode", "expandtabs", "format", "format_map")
_METHODS_LEFT_OUT += ("ljust", "rjust", "translate", "zfill")
_LONG = 1 << 16  # characters; after an operation on so many the clock is looked at


class TemplateLimit(SecurityError):
    """The template ran too long or built too much."""


class Meter:
    """Remaining budget of one rendering."""

    def __init__(self, max_steps: int = MAX_STEPS, max_seconds: float = MAX_SECONDS):
        self._max_steps, self._max_seconds = max_steps, max_seconds
        self.restart()

    def restart(self) -> None:
        """Begin the budget of another rendering."""
        self._steps, self._total = self._max_steps, MAX_TOTAL
        self._end_s = time.monotonic() + self._max_seconds

    def step(self) -> str:
        """Count one step. Returns the empty text, so that it can stand in a template."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimit("it takes too many steps")
        if self._steps % 64 == 0 and time.monotonic() > self._end_s:
            raise TemplateLimit("it takes too long")
        return ""

    def build(self, length: int) -> None:
        """Count one operation that is about to build a text of this length."""
        self.step()
        if length > MAX_LENGTH:
            raise TemplateLimit("it builds texts that are too long")
        self.charge(length)

    def charge(self, length: int) -> None:
        """Count work on so many characters."""
        self._total -= length
        if self._total < 0:
            raise TemplateLimit("it builds texts that are too long")
        if length > _LONG and time.monotonic() > self._end_s:
            raise TemplateLimit("it takes too long")

    def sliced(self, value: Any) -> Any:
        """Return the value, of which a slice is about to be copied."""
        if _weight(value):
            self.build(len(value) * _weight(value))
        return value

    def shown(self, value: Any) -> Any:
        """Return the value, whose text is about to be built, and count what is in it."""
        left = [value]
        while left and not isinstance(value, str):
            item = left.pop()
            self.step()
            if isinstance(item, Mapping):
                left += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                left += item
            elif isinstance(item, str):
                self.build(len(item))
        return value

    def join(self, parts: Iterable[Any]) -> str:
        """Return the parts as one text."""
        texts, length = [], 0
        for part in parts:
            texts.append(str(self.shown(part)))
            length += len(texts[-1])
            if length > MAX_LENGTH:
                break
        self.build(length)
        return "".join(texts)


class GenerationTag(Extension):
    """{% generation %} .. {% endgeneration %} marks the assistant's words; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering at a time; `meter` bounds it."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, meter: Meter):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=meter.shown,
        )
        self.meter = meter
        self.concat = meter.join  # jinja2 builds outputs, blocks and macros with it
        self.tests = bounded_tests(meter, self.tests)
        self.filters = bounded_filters(meter, self.filters)
        self.filters["indent"] = self._indent
        self.filters["join"] = self._join
        self.filters["replace"] = self._replace
        self.filters["string"] = lambda value: str(meter.shown(value))
        del self.globals["lipsum"]

    def compile_source(self, source: str) -> CodeType:
        """Return the code of a template; it can run in any environment of this class."""
        code = self.compile(source)
        assert isinstance(code, CodeType)
        return code

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put a step into every loop and macro, and make every `~` a bounded one."""
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.Output([_meter_call("step")], lineno=node.lineno))
        for node in list(tree.find_all(nodes.Concat)):
            node.nodes = [_meter_call("join", nodes.List(node.nodes))]
        for node in list(tree.find_all(nodes.Compare)):
            node.expr = _meter_call("shown", node.expr)
            for operand in node.ops:
                operand.expr = _meter_call("shown", operand.expr)
        for node in list(tree.find_all(nodes.Pair)):
            node.key = _meter_call("shown", node.key)
        for node in list(tree.find_all(nodes.Getitem)):
            if isinstance(node.arg, nodes.Slice):
                node.node = _meter_call("sliced", node.node)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_number(left)
        check_number(right)
        check = {"+": self._check_sum, "*": self._check_product, "**": _check_power}
        if operator == "%" and isinstance(left, str | bytes):
            raise SecurityError("texts cannot be formatted with %")
        if operator in check:
            check[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """`format` is left out, so that it needs no wrapper."""
        return

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _METHODS_LEFT_OUT:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.meter.step()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            obj = functools.partial(self._replace, owner)
        elif isinstance(owner, str) and name == "join":
            obj = functools.partial(self._join, d=owner)
        elif isinstance(owner, str):
            obj = bounded_method(self.meter, owner, name)
        elif isinstance(owner, list | tuple | dict | LoopContext):
            self.meter.shown([*args, owner if name in ("count", "index") else None])
        return super().call(context, obj, *args, **kwargs)

    def _check_sum(self, left: Any, right: Any) -> None:
        if _weight(left) and _weight(right):
            self.meter.build(len(left) * _weight(left) + len(right) * _weight(right))

    def _check_product(self, left: Any, right: Any) -> None:
        for sized, count in ((left, right), (right, left)):
            if _weight(sized) and isinstance(count, int):
                self.meter.build(len(sized) * _weight(sized) * max(0, count))
                return
        if max(abs(left), abs(right)) >= 1 << 64:
            raise SecurityError("the numbers of a product are too large")

    def _indent(self, text: Any, width: int | str = 4, first: bool = False, blank: bool = False):
        size = width if isinstance(width, int) else len(width)
        if not 0 <= size <= _MAX_INDENT:
            raise SecurityError(f"an indent must be in [0, {_MAX_INDENT}]")
        text = str(self.meter.shown(text))
        self.meter.build(len(text) + size * (1 + len(text.splitlines())))
        return filters.do_indent(text, width, first, blank)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = (str(self.meter.shown(value)) for value in (text, old, new))
        replacements = text.count(old)
        if count is not None and count >= 0:
            replacements = min(replacements, count)
        self.meter.build(len(text) + replacements * max(0, len(new) - len(old)))
        return text.replace(old, new, replacements)

    def _join(self, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
        items = entries(self.meter, value)
        items = [self.getitem(item, attribute) if attribute else item for item in items]
        texts = [str(self.meter.shown(item)) for item in items]
        self.meter.build(sum(map(len, texts)) + len(str(d)) * len(texts))
        return str(d).join(texts)


def _check_power(left: Any, right: Any) -> None:
    if not (abs(left) < 1 << 32 and abs(right) < 64):
        raise SecurityError("the numbers of a power are too large")


def _meter_call(method: str, *args: nodes.Expr) -> nodes.Call:
    target = nodes.Getattr(nodes.EnvironmentAttribute("meter"), method, "load")
    return nodes.Call(target, list(args), [], None, None)


def _weight(value: Any) -> int:
    """Characters that one entry of a text or list counts as; 0 for other things."""
    if isinstance(value, str | bytes):
        return 1
    return _ENTRY if isinstance(value, list | tuple) else 0
