"""Patterns of module names in adapter_config.json, matched in linear time. No jax.

PEFT matches `re.match(rf"(.*\\.)?({pattern})$", name)`. `re` goes back and forth: a pattern of 40
characters may take it days, and it holds the interpreter lock. So the part of `re`'s language that
adapters use is read here. A pattern without repetition or choice goes to `re`; the others become an
automaton whose state is a set of places in the pattern, which takes one step for each character.
"""

import re

from lora_jax.adapters.formats.pattern_automaton import Automaton, Budget
from lora_jax.adapters.formats.pattern_syntax import Parser, PatternRefused

__all__ = ["Budget", "Pattern", "PatternRefused"]

MAX_LENGTH = 512  # characters of a pattern


class Pattern:
    """One pattern, as PEFT means it."""

    def __init__(self, source: str, budget: Budget | None = None):
        """Raise PatternRefused for what is not read here."""
        if len(source) > MAX_LENGTH:
            raise PatternRefused(f"it has {len(source)} characters, at most {MAX_LENGTH} are read")
        parser = Parser(source)
        tree = parser.parse()
        self.source = source
        self.is_plain = parser.is_plain
        self._matcher: re.Pattern[str] | Automaton
        if parser.is_plain:
            self._matcher = re.compile(rf"(.*\.)?({source})$")
        else:
            self._matcher = Automaton(tree, budget or Budget())

    def match(self, name: str) -> bool:
        """Return whether the pattern is the name, or its end behind a dot."""
        return bool(self._matcher.match(name))
