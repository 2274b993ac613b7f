"""Repetitions in the tokens of one sequence: what followed the last tokens where they stood before.

No jax.
"""

from collections.abc import Sequence as SequenceOf

WINDOW = 16384  # tokens before the first look that are known; bounds memory and time of a long one
_MOST_PLACES = 8  # of which the longest repetition is taken


class Repetitions:
    """Index of the runs of `low` tokens; the longest repetition, of up to `high` tokens, counts.

    The tokens themselves are the caller's list, which only grows.
    """

    def __init__(self, token_ids: SequenceOf[int], low: int, high: int):
        self._tokens, self._low, self._high = token_ids, low, high
        self._first = max(0, len(token_ids) - WINDOW)
        self._last: dict[tuple[int, ...], int] = {}  # run: place of its last token, latest one
        self._before: list[int] = []  # of each known place: that of the same run before, or -1
        self._found = -1  # place before which the last known tokens stand once more
        self._num_equal = 0  # tokens before it that are the last known ones, `high` at most

    @property
    def num_known(self) -> int:
        """Tokens that are indexed, from the start of the sequence."""
        return self._first + len(self._before)

    @property
    def next_token(self) -> int | None:
        """The token that is expected after the known ones; None without a repetition."""
        return self._tokens[self._found] if self._found >= 0 else None

    def extend(self, end: int) -> list[bool]:
        """Index the tokens up to place `end`; return of each that was expected if it came.

        Where nothing was expected, a token has no entry. A repetition of fewer than `high` tokens
        that goes on stays the longest, so that nothing is looked for.
        """
        tokens, low, high, first = self._tokens, self._low, self._high, self._first
        last, before, came = self._last, self._before, []
        found, num_equal = self._found, self._num_equal
        for place in range(self.num_known, end):
            goes_on = found >= 0 and tokens[found] == tokens[place]
            if found >= 0:
                came.append(goes_on)
            start = place + 1 - low
            if start < first:
                before.append(-1)
                continue
            run = tuple(tokens[start : place + 1])
            index = last.get(run, -1)
            last[run] = place
            before.append(index)
            if goes_on and num_equal < high:
                found, num_equal = found + 1, num_equal + 1
            elif index >= 0:
                found, num_equal = self._longest(index, place)
            else:
                found = -1
        self._found, self._num_equal = found, num_equal
        return came

    def following(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the repetition; a period goes on and on."""
        if self._found < 0:
            return []
        draft = self._tokens[self._found : min(self._found + count, self.num_known)]
        return [draft[i % len(draft)] for i in range(count)]

    def _longest(self, index: int, end: int) -> tuple[int, int]:
        """Return the latest place after the longest repetition of the tokens up to `end`, and its
        length.
        """
        best, best_length = index, 0
        for _ in range(_MOST_PLACES):
            if index < 0:
                break
            length = self._length(index, end)
            if length > best_length:
                best, best_length = index, length
            if length == self._high:
                break
            index = self._before[index - self._first]
        return best + 1, best_length

    def _length(self, index: int, end: int) -> int:
        """Return how many tokens up to `index` are those up to `end`, `high` at most."""
        tokens, length = self._tokens, self._low
        most = min(self._high, index - self._first + 1)
        while length < most and tokens[index - length] == tokens[end - length]:
            length += 1
        return length
