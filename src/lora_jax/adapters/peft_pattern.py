"""Patterns of module names in adapter_config.json, matched in linear time. No jax.

PEFT matches `re.match(rf"(.*\\.)?({pattern})$", name)`. `re` goes back and forth: a pattern of 40
characters may take it days, and it holds the interpreter lock. So the part of `re`'s language that
adapters use is read here: literals, `.`, escapes, classes, groups, `|`, `* + ? {m,n}`, `^` and `$`.
A pattern without repetition or choice goes to `re`; the others become an automaton whose state is
a set of places in the pattern, which takes one step for each character.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator

MAX_LENGTH = 512  # characters of a pattern
_MAX_PLACES = 1024  # of the automaton, with repetitions written out
_MAX_CACHED = 256  # steps that a pattern remembers
_STEP_COST = 40  # of a step that is not remembered, for each place, in steps that are
_REACH_COST = 20  # of a place that is passed, when such a step is made
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


class Budget:
    """Steps that all patterns of one adapter may still take."""

    def __init__(self, steps: int = 30_000_000):
        self._steps = steps

    def spend(self, steps: int) -> None:
        """Count steps; ValueError when there are none left."""
        self._steps -= steps
        if self._steps < 0:
            raise ValueError("the patterns take too many steps to match.")


class Pattern:
    """One pattern, as PEFT means it."""

    def __init__(self, source: str, budget: Budget | None = None):
        """Raise PatternRefused for what is not read here."""
        if len(source) > MAX_LENGTH:
            raise PatternRefused(f"it has {len(source)} characters, at most {MAX_LENGTH} are read")
        parser = _Parser(source)
        tree = parser.parse()
        self.source = source
        self.is_plain = parser.is_plain
        self._matcher: re.Pattern[str] | _Automaton
        if parser.is_plain:
            self._matcher = re.compile(rf"(.*\.)?({source})$")
        else:
            self._matcher = _Automaton(tree, budget or Budget())

    def match(self, name: str) -> bool:
        """Return whether the pattern is the name, or its end behind a dot."""
        return bool(self._matcher.match(name))


@dataclasses.dataclass(frozen=True, eq=False)
class _Char:
    """One character that passes the test."""

    test: Test


@dataclasses.dataclass(frozen=True)
class _Anchor:
    """The beginning or the end of the name."""

    is_end: bool


@dataclasses.dataclass(frozen=True)
class _Row:
    """Parts that follow each other."""

    parts: tuple["_Tree", ...]


@dataclasses.dataclass(frozen=True)
class _Choice:
    """One of the parts."""

    parts: tuple["_Tree", ...]


@dataclasses.dataclass(frozen=True)
class _Repeat:
    """The part, `least` to `most` times; None: any number."""

    part: "_Tree"
    least: int
    most: int | None


_Tree = _Char | _Anchor | _Row | _Choice | _Repeat


class _Parser:
    """Reads one pattern from left to right."""

    def __init__(self, source: str):
        self._source, self._at = source, 0
        self.is_plain = True  # neither repetition nor choice

    def parse(self) -> _Tree:
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

    def _choice(self, depth: int) -> _Tree:
        if depth > _MAX_DEPTH:
            raise PatternRefused(f"its groups are nested more than {_MAX_DEPTH} deep")
        parts = [self._row(depth)]
        while self._peek() == "|":
            self._at += 1
            self.is_plain = False
            parts.append(self._row(depth))
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _row(self, depth: int) -> _Tree:
        parts: list[_Tree] = []
        while self._peek() and self._peek() not in "|)":
            parts.append(self._repeated(self._part(depth)))
        return _Row(tuple(parts))

    def _part(self, depth: int) -> _Tree:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char in "^$":
            return _Anchor(char == "$")
        if char == "[":
            return _Char(self._class())
        if char == "\\":
            return _Char(self._escape())
        if char == ".":
            return _Char(lambda symbol: symbol != "\n")
        if char in "*+?{":
            raise PatternRefused(f"{char} repeats nothing")
        return _Char(char.__eq__)

    def _group(self, depth: int) -> _Tree:
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

    def _repeated(self, part: _Tree) -> _Tree:
        bounds = self._bounds()
        if bounds is None:
            return part
        self.is_plain = False
        if isinstance(part, _Anchor):
            raise PatternRefused("^ or $ is repeated")
        if self._peek() == "?":  # takes as little as it can: the same names match
            self._at += 1
        elif self._peek() == "+":
            raise PatternRefused("a repetition that gives nothing back (+ behind it) is not read")
        if self._bounds() is not None:
            raise PatternRefused("a repetition is repeated without a group")
        return _Repeat(part, *bounds)

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


class _Automaton:
    """The places of a pattern and the steps between them.

    `_codes` holds tests of characters, anchors, forks and the end; a set of places is an integer
    with a bit for each. Sets that were met are remembered with the character that follows.
    """

    def __init__(self, tree: _Tree, budget: Budget):
        self._codes: list[_Code] = []
        self._budget = budget
        self._write(tree)
        self._add(_Match())
        self._first = self._reach(0, at_begin=True)
        self._restart = self._reach(0)  # behind a dot
        self._next: dict[int, int] = {}  # what is reached behind a character's place
        self._cache: dict[tuple[int, str], int] = {}

    def match(self, name: str) -> bool:
        """Return whether the pattern is the name or its end behind a dot."""
        self._budget.spend(len(name))
        places, cache = self._first, self._cache
        for char in name:
            cached = cache.get((places, char))
            places = self._step(places, char) if cached is None else cached
        return any(self._ends(place) for place in _bits(places))

    def _step(self, places: int, char: str) -> int:
        reached = self._restart if char == "." else 0
        count = 0
        for place in _bits(places):
            code = self._codes[place]
            count += 1
            if isinstance(code, _Char) and code.test(char):
                if place not in self._next:
                    self._next[place] = self._reach(place + 1)
                reached |= self._next[place]
        self._budget.spend(_STEP_COST * (5 + count))
        if len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        self._cache[places, char] = reached
        return reached

    def _ends(self, place: int) -> bool:
        """Return whether the pattern may end here when the name does."""
        if isinstance(self._codes[place], _Anchor):
            return any(
                isinstance(self._codes[p], _Match)
                for p in _bits(self._reach(place + 1, at_end=True))
            )
        return isinstance(self._codes[place], _Match)

    def _reach(self, start: int, *, at_begin: bool = False, at_end: bool = False) -> int:
        """Return the places that are reached from `start` without a character."""
        reached, seen, left = 0, 0, [start]
        while left:
            place = left.pop()
            if seen >> place & 1:
                continue
            seen |= 1 << place
            code = self._codes[place]
            if isinstance(code, _Fork):
                left += code.places
            elif isinstance(code, _Anchor) and (at_end if code.is_end else at_begin):
                left.append(place + 1)
            elif not isinstance(code, _Anchor) or code.is_end:
                reached |= 1 << place
        self._budget.spend(_REACH_COST * seen.bit_count())
        return reached

    def _add(self, code: "_Code") -> int:
        if len(self._codes) >= _MAX_PLACES:
            raise PatternRefused(f"it takes more than {_MAX_PLACES} places, repetitions included")
        self._codes.append(code)
        return len(self._codes) - 1

    def _write(self, tree: _Tree) -> None:
        """Append the codes of a tree, which end at the place behind them."""
        if isinstance(tree, _Row):
            for part in tree.parts:
                self._write(part)
        elif isinstance(tree, _Choice):
            self._write_choice(tree.parts)
        elif isinstance(tree, _Repeat):
            self._write_repeat(tree)
        else:
            self._add(tree)

    def _write_choice(self, parts: tuple[_Tree, ...]) -> None:
        fork = self._add(_Fork(()))
        begins, ends = [], []
        for part in parts:
            begins.append(len(self._codes))
            self._write(part)
            ends.append(self._add(_Fork(())))
        self._codes[fork] = _Fork(tuple(begins))
        for end in ends:
            self._codes[end] = _Fork((len(self._codes),))

    def _write_repeat(self, repeat: _Repeat) -> None:
        for _ in range(repeat.least):
            self._write(repeat.part)
        if repeat.most is None:
            fork = self._add(_Fork(()))
            self._write(repeat.part)
            self._add(_Fork((fork,)))
            self._codes[fork] = _Fork((fork + 1, len(self._codes)))
            return
        forks = []
        for _ in range(repeat.most - repeat.least):
            forks.append(self._add(_Fork(())))
            self._write(repeat.part)
        for fork in forks:
            self._codes[fork] = _Fork((fork + 1, len(self._codes)))


@dataclasses.dataclass(frozen=True)
class _Fork:
    """Goes on at each of the places."""

    places: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Match:
    """The end of the pattern."""


_Code = _Char | _Anchor | _Fork | _Match


def _bits(places: int) -> Iterator[int]:
    while places:
        low = places & -places
        yield low.bit_length() - 1
        places ^= low
