"""Compiled grammars of one model: checked in a process of their own, kept by digest."""

import collections
import os
import threading
import time
from typing import TYPE_CHECKING

from serving.api.request import EngineDead, QueueFull
from serving.api.sampling import Sampling
from serving.api.structured_outputs import StructuredOutputs
from serving.text.structured.checker import Checker, GrammarRefused
from serving.text.structured.row_masks import THREADS, RowMasks
from serving.text.structured.vocabulary import Vocabulary, has_llguidance, parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_BYTES = 256 << 20  # of the grammars that are kept
MAX_KEPT = 256
MAX_WAITING = 64  # structures that wait for their check
LIMIT_S = 5.0  # of a check
MOST_COMPILED = min(16, len(os.sched_getaffinity(0)))  # times that one grammar is
MOST_BYTES = 16 << 20  # of all of them
_QUICK_S = 0.05  # a grammar that takes longer is compiled once only
_RETRY_AFTER_S = 1.0


class Grammar:
    """A compiled grammar; each answer has a matcher of its own.

    Copies of a matcher share what they learn of the grammar behind one lock: of rows with the same
    grammar only one at a time gets its mask. So a grammar that many answers use is compiled
    several times, by callers; any thread may call it.
    """

    def __init__(self, compiled: "LLMatcher", num_bytes: int, text: str = ""):
        """`text` is what it may be compiled from again, `num_bytes` what one takes, roughly."""
        self._compiled, self._one_bytes, self.text = [compiled], num_bytes, text
        self._num_asked = self._num_started = 0

    @property
    def bytes(self) -> int:
        """Memory, roughly."""
        return self._one_bytes * len(self._compiled)

    @property
    def num_compiled(self) -> int:
        """Number of times it was compiled."""
        return len(self._compiled)

    def asked(self) -> bool:
        """Count a question, and return whether there are enough to compile it once more."""
        self._num_asked += 1
        few = len(self._compiled) < min(MOST_COMPILED, self._num_asked // 2)
        return bool(self.text) and few and self.bytes + self._one_bytes <= MOST_BYTES

    def add(self, compiled: "LLMatcher") -> None:
        """Take the same grammar, compiled once more."""
        self._compiled.append(compiled)

    def start(self) -> "LLMatcher":
        """Return a matcher that has seen nothing."""
        self._num_started += 1
        return self._compiled[self._num_started % len(self._compiled)].deep_copy()


class Grammars:
    """Compiles structures in the thread that asks; any thread may."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        *,
        limit_s: float = LIMIT_S,
        max_bytes: int = MAX_BYTES,
        max_kept: int = MAX_KEPT,
        max_waiting: int = MAX_WAITING,
        most_threads: int = THREADS,
        why_none: str = "structured_outputs need a model whose files name its end token.",
    ):
        """Without a vocabulary every structure is refused, as `why_none` says.

        `most_threads` is RowMasks'.
        """
        self._why_none = why_none
        if vocabulary is not None and not has_llguidance():
            vocabulary, self._why_none = None, "structured_outputs need the package llguidance."
        self.masks = RowMasks(() if vocabulary is None else vocabulary.end_ids, most_threads)
        # Made now, not for the first grammar: llguidance holds Python's lock all the while, 1.4 s
        # of processor time for 152,000 random tokens, and the engine's loop would stand still.
        self._tokenizer = None if vocabulary is None else vocabulary.tokenizer()
        self._checker = None if vocabulary is None else Checker(vocabulary, limit_s)
        self._max_bytes, self._max_kept, self._max_waiting = max_bytes, max_kept, max_waiting
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._bytes = 0
        # By digest, in the order of their last use; a text is the reason of a refusal.
        self._kept: collections.OrderedDict[str, Grammar | str] = collections.OrderedDict()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Return the grammar of a structure, a kept one if there is one.

        Raises GrammarRefused (a ValueError), QueueFull when many structures wait already, or
        EngineDead after `close`.
        """
        grammar = self._find(outputs)
        if grammar is not None:
            if grammar.asked():
                self._add(outputs.digest, grammar)
            return grammar
        outcome = self._make(outputs)
        self._keep(outputs.digest, outcome)
        return _grammar(outcome)

    def find(self, outputs: StructuredOutputs) -> Grammar | None:
        """Return a grammar that is kept, at once; GrammarRefused for one that was refused.

        None also for one that `compile` would compile once more.
        """
        grammar = self._find(outputs)
        return None if grammar is not None and grammar.asked() else grammar

    def _find(self, outputs: StructuredOutputs) -> Grammar | None:
        with self._lock:
            kept = self._kept.get(outputs.digest)
            if kept is None:
                return None
            self._kept.move_to_end(outputs.digest)
        return _grammar(kept)

    def of(self, sampling: Sampling) -> Grammar | None:
        """Return the grammar of a sampling's structure, None for one that nothing binds."""
        outputs = sampling.structured_outputs
        return None if outputs is None else self.compile(outputs)

    def close(self) -> None:
        """End the process that checks and the thread that fills masks, if they run."""
        self.masks.close()
        if self._checker is not None:
            self._checker.close()

    @property
    def num_bytes(self) -> int:
        """Memory of the grammars that are kept, roughly."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._kept)

    def _make(self, outputs: StructuredOutputs) -> Grammar | str:
        if self._checker is None:
            return self._why_none
        with self._lock:
            if self._num_waiting >= self._max_waiting:
                raise QueueFull("Too many structured outputs are being compiled.", _RETRY_AFTER_S)
            self._num_waiting += 1
        try:
            checked = self._checker.check(outputs)
        except GrammarRefused as error:
            return str(error)
        except EOFError as error:
            raise EngineDead(str(error)) from None
        finally:
            with self._lock:
                self._num_waiting -= 1
        began = time.monotonic()
        matcher = self._compiled(checked.text)
        if matcher.is_error():  # the same text has just compiled
            return f"structured_outputs: {matcher.get_error()[:300]}"
        is_quick = time.monotonic() - began < _QUICK_S
        return Grammar(matcher, checked.bytes, checked.text if is_quick else "")

    def _compiled(self, text: str) -> "LLMatcher":
        from llguidance import LLMatcher

        assert self._tokenizer is not None  # there is a checker
        return LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())

    def _add(self, digest: str, grammar: Grammar) -> None:
        """Compile a grammar that is kept once more, for more rows at a time."""
        matcher = self._compiled(grammar.text)
        with self._lock:
            before = grammar.bytes
            more = before // grammar.num_compiled
            is_kept = self._kept.get(digest) is grammar
            if is_kept and not matcher.is_error() and self._bytes + more <= self._max_bytes:
                grammar.add(matcher)
                self._bytes += grammar.bytes - before
            else:  # each question would compile it in vain
                grammar.text = ""

    def _keep(self, digest: str, outcome: Grammar | str) -> None:
        """Keep what was made, and forget what was used longest ago beyond the bounds."""
        with self._lock:
            self._forget(self._kept.pop(digest, None))
            self._kept[digest] = outcome
            self._bytes += _size(outcome)
            while self._bytes > self._max_bytes or len(self._kept) > self._max_kept:
                self._forget(self._kept.popitem(last=False)[1])

    def _forget(self, gone: Grammar | str | None) -> None:
        self._bytes -= 0 if gone is None else _size(gone)


def _grammar(outcome: Grammar | str) -> Grammar:
    if isinstance(outcome, str):
        raise GrammarRefused(outcome)
    return outcome


def _size(outcome: Grammar | str) -> int:
    return len(outcome) if isinstance(outcome, str) else outcome.bytes
