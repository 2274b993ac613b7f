"""Syntax of patterns of module names: the part of `re`'s language that adapters use. No jax.

Literals, `.`, escapes, classes, groups, `|`, `* + ? {m,n}`, `^` and `$` become a tree.
"""

import dataclasses
import re
from collections.abc import Callable

_MAX_DEPTH = 20  # groups in groups
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
}
_SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_COUNT = re.compile(r"\{([0-9]{1,4})(,([0-9]{0,4}))?\}")

Test = Callable[[str], bool]


class PatternRefused(ValueError):
    """A pattern that is not read here; the message says which part of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Char:
    """One character that passes the test."""

    test: Test


@dataclasses.dataclass(frozen=True)
class Anchor:
    """The beginning or the end of the name."""

    is_end: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """Parts that follow each other."""

    parts: tuple["Tree", ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the parts."""

    parts: tuple["Tree", ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """The part, `least` to `most` times; None: any number."""

    part: "Tree"
    least: int
    most: int | None


Tree = Char | Anchor | Row | Choice | Repeat


class Parser:
    """Reads one pattern from left to right."""

    def __init__(self, source: str):
        self._source, self._at = source, 0
        self.is_plain = True  # neither repetition nor choice

    def parse(self) -> Tree:
        tree = self._choice(0)
        if self._at < len(self._source):
            raise PatternRefused("it has a ) without a (")
        return tree

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternRefused("it ends too early")
        self._at += 1
        return char

    def _choice(self, depth: int) -> Tree:
        if depth > _MAX_DEPTH:
            raise PatternRefused(f"its groups are nested more than {_MAX_DEPTH} deep")
        parts = [self._row(depth)]
        while self._peek() == "|":
            self._at += 1
            self.is_plain = False
            parts.append(self._row(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _row(self, depth: int) -> Tree:
        parts: list[Tree] = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repeated(self._part(depth)))
        return Row(tuple(parts))

    def _part(self, depth: int) -> Tree:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char in "^$":
            return Anchor(char == "$")
        if char == "[":
            return Char(self._class())
        if char == "\\":
            return Char(self._escape())
        if char == ".":
            return Char(lambda symbol: symbol != "\n")
        if char in "*+?{":
            raise PatternRefused(f"{char} repeats nothing")
        return Char(char.__eq__)

    def _group(self, depth: int) -> Tree:
        if self._peek() == "?":
            if self._source.startswith("?:", self._at):
                self._at += 2
            else:
                opening = self._source[self._at - 1 : self._at + 3]
                raise PatternRefused(f"the group {opening}... is not read; ( and (?: are")
        tree = self._choice(depth + 1)
        if self._peek() != ")":
            raise PatternRefused("it has a ( without a )")
        self._at += 1
        return tree

    def _escape(self) -> Test:
        char = self._take()
        if char.lower() in _CLASSES:
            test = _CLASSES[char.lower()]
            return test if char.islower() else lambda symbol: not test(symbol)
        if char.isascii() and char.isalnum():
            raise PatternRefused(f"\\{char} is not read; \\d, \\w and \\s are")
        return char.__eq__

    def _class(self) -> Test:
        negated = self._peek() == "^"
        self._at += negated
        tests: list[Test] = []
        while not (tests and self._peek() == "]"):
            tests.append(self._class_entry(first=not tests))
        self._at += 1
        return lambda symbol: any(test(symbol) for test in tests) != negated

    def _class_entry(self, first: bool) -> Test:
        char = self._take()
        if char == "[" or self._source.startswith(("--", "&&", "~~", "||"), self._at - 1):
            raise PatternRefused("a class in a class is not read")
        if char == "\\":
            test, low = self._escape(), self._source[self._at - 1]
            if low.lower() in _CLASSES:
                if self._is_range():
                    raise PatternRefused("a class has a range without two ends")
                return test
            char = low
        if not self._is_range():
            return char.__eq__
        self._at += 1
        high = self._take()
        if high == "\\":
            self._escape()
            high = self._source[self._at - 1]
            if high.lower() in _CLASSES:
                raise PatternRefused("a class has a range without two ends")
        elif high == "[":
            raise PatternRefused("a class in a class is not read")
        if high < char:
            raise PatternRefused(f"the range {char}-{high} of a class is empty")
        return lambda symbol: char <= symbol <= high

    def _is_range(self) -> bool:
        return self._peek() == "-" and self._source[self._at + 1 : self._at + 2] not in ("", "]")

    def _repeated(self, part: Tree) -> Tree:
        bounds = self._bounds()
        if bounds is None:
            return part
        self.is_plain = False
        if isinstance(part, Anchor):
            raise PatternRefused("^ or $ is repeated")
        if self._peek() == "?":  # takes as little as it can: the same names match
            self._at += 1
        elif self._peek() == "+":
            raise PatternRefused("a repetition that gives nothing back (+ behind it) is not read")
        if self._bounds() is not None:
            raise PatternRefused("a repetition is repeated without a group")
        return Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Return what a repetition that stands here says, None where there is none."""
        char = self._peek()
        if char in _SIGNS:
            self._at += 1
            return _SIGNS[char]
        if char != "{":
            return None
        match = _COUNT.match(self._source, self._at)
        if match is None:
            raise PatternRefused("a { without a count is not read; \\{ is")
        self._at = match.end()
        least = int(match[1])
        most = least if match[2] is None else int(match[3]) if match[3] else None
        if most is not None and most < least:
            raise PatternRefused(f"{match[0]} has its bounds the wrong way round")
        return least, most
