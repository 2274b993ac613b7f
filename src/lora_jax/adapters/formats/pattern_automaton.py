"""Automata of patterns of module names: one step for each character, within a budget. No jax."""

import dataclasses
from collections.abc import Iterator

from lora_jax.adapters.formats.pattern_syntax import (
    Anchor,
    Char,
    Choice,
    PatternRefused,
    Repeat,
    Row,
    Tree,
)

_MAX_PLACES = 1024  # of the automaton, with repetitions written out
_MAX_CACHED = 256  # steps that a pattern remembers
_STEP_COST = 40  # of a step that is not remembered, for each place, in steps that are
_REACH_COST = 20  # of a place that is passed, when such a step is made


class Budget:
    """Steps that all patterns of one adapter may still take."""

    def __init__(self, steps: int = 30_000_000):
        self._steps = steps

    def spend(self, steps: int) -> None:
        """Count steps; ValueError when there are none left."""
        self._steps -= steps
        if self._steps < 0:
            raise ValueError("the patterns take too many steps to match.")


class Automaton:
    """The places of a pattern and the steps between them.

    `_codes` holds tests of characters, anchors, forks and the end; a set of places is an integer
    with a bit for each. Sets that were met are remembered with the character that follows.
    """

    def __init__(self, tree: Tree, budget: Budget):
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
            if isinstance(code, Char) and code.test(char):
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
        if isinstance(self._codes[place], Anchor):
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
            elif isinstance(code, Anchor) and (at_end if code.is_end else at_begin):
                left.append(place + 1)
            elif not isinstance(code, Anchor) or code.is_end:
                reached |= 1 << place
        self._budget.spend(_REACH_COST * seen.bit_count())
        return reached

    def _add(self, code: "_Code") -> int:
        if len(self._codes) >= _MAX_PLACES:
            raise PatternRefused(f"it takes more than {_MAX_PLACES} places, repetitions included")
        self._codes.append(code)
        return len(self._codes) - 1

    def _write(self, tree: Tree) -> None:
        """Append the codes of a tree, which end at the place behind them."""
        if isinstance(tree, Row):
            for part in tree.parts:
                self._write(part)
        elif isinstance(tree, Choice):
            self._write_choice(tree.parts)
        elif isinstance(tree, Repeat):
            self._write_repeat(tree)
        else:
            self._add(tree)

    def _write_choice(self, parts: tuple[Tree, ...]) -> None:
        fork = self._add(_Fork(()))
        begins, ends = [], []
        for part in parts:
            begins.append(len(self._codes))
            self._write(part)
            ends.append(self._add(_Fork(())))
        self._codes[fork] = _Fork(tuple(begins))
        for end in ends:
            self._codes[end] = _Fork((len(self._codes),))

    def _write_repeat(self, repeat: Repeat) -> None:
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


_Code = Char | Anchor | _Fork | _Match


def _bits(places: int) -> Iterator[int]:
    while places:
        low = places & -places
        yield low.bit_length() - 1
        places ^= low
