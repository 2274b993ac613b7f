"""Seconds of decode steps with and without drafts, and which drafts pay by them. No jax."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence

_LATELY = 8  # steps of a kind whose times are remembered
_FEW = 3  # steps of a kind before their times count
_MARGIN = 1.1  # by which a step with drafts must be better: times are noisier than 3%
_MEASURE_DRAFTED = 256  # decisions against drafts after which steps with drafts are tried again
_LONGEST = 8192  # what this number may grow to, twofold each time that drafts do not pay
_MEASURE_PLAIN = 192  # decisions for drafts after which steps without are measured again
_KEPT = 0.9  # of the guesses expected and right so far, with each step that has drafts
_TRIED = 6  # steps with drafts after which what they won and cost counts
_REMEMBERED = 0.95  # of what they won and cost, with each one

Times = collections.deque[tuple[int, float]]  # tokens and seconds of steps of a kind


@dataclasses.dataclass(eq=False)
class _Account:
    """Gains and costs of drafts in steps of about as many rows, and decisions for and against.

    Seconds won are those of plain steps that right guesses replaced; the cost is the surplus.
    """

    tried: int = 0  # steps with drafts since they were given up
    won: float = 0.0
    cost: float = 0.0
    expected: float = 0.0  # right guesses of steps with drafts lately, as expected and as counted
    right: float = 0.0
    num_paid: int = 0  # decisions for drafts since plain steps were measured
    num_refused: int = 0  # decisions against drafts since they were tried
    patience: int = _MEASURE_DRAFTED

    @property
    def loses(self) -> bool:
        return self.tried >= _TRIED and self.won < self.cost

    @property
    def share(self) -> float:
        """Part of the expected guesses that is right: those are sent that were right lately."""
        return min(1.0, (self.right + 1.0) / (self.expected + 1.0))

    def weigh(self, won: float, cost: float) -> None:
        self.tried += 1
        self.won = _REMEMBERED * self.won + won
        self.cost = _REMEMBERED * self.cost + cost

    def refuse(self) -> bool:
        """Count a decision against drafts; return whether they are to be tried again."""
        self.num_refused += 1
        if self.num_refused < self.patience:
            return False
        self.patience, self.num_refused = min(2 * self.patience, _LONGEST), 0
        self.tried, self.won, self.cost, self.expected, self.right = 0, 0.0, 0.0, 0.0, 0.0
        return True

    def pay(self) -> bool:
        """Count a decision for drafts; return whether plain steps are to be measured again."""
        self.num_paid += 1
        if self.num_paid < _MEASURE_PLAIN:
            return False
        self.patience, self.num_paid = _MEASURE_DRAFTED, 0
        return True


class DraftTimes:
    """Times of decode steps lately; chooses how many guesses a step takes.

    Steps of rows or tokens of the same number of binary digits are of a kind.
    """

    def __init__(self) -> None:
        self._plain: dict[int, collections.deque[float]] = {}  # by digits of the number of rows
        self._drafted: dict[int, Times] = {}  # by digits of the number of tokens
        self._accounts: dict[int, _Account] = {}  # by digits of the number of rows
        self._last: tuple[Times, _Account] | None = None  # of the step before, if it had drafts

    def add(
        self,
        *,
        drafts: bool,
        rows: int,
        num_tokens: int,
        right: int,
        seconds: float,
        expected: float = 0.0,
    ) -> None:
        """Remember a step, given in the order of steps, from the results of the one before.

        `right` guesses of it, of `rows` sequences, were right, and `expected` were expected to be.
        A plain step after one with drafts began late: what it took longer is the other's cost.
        """
        last, self._last = self._last, None
        plain = self._plain.get(rows.bit_length())
        if plain is None:
            plain = self._plain[rows.bit_length()] = collections.deque(maxlen=_LATELY)
        if drafts:
            account = self._account(rows)
            account.expected = _KEPT * account.expected + expected
            account.right = _KEPT * account.right + right
            if plain:
                usual = statistics.median(plain)
                account.weigh(usual * right / rows, seconds - usual)
            kind = num_tokens.bit_length()
            times = self._drafted.setdefault(kind, collections.deque(maxlen=_LATELY))
            times.append((num_tokens, seconds))
            self._last = times, account
        elif last is None:
            plain.append(seconds)
        elif plain:
            late = max(0.0, seconds - statistics.median(plain))
            times, account = last
            times[-1] = times[-1][0], times[-1][1] + late
            account.cost += late

    def interrupt(self) -> None:
        """Have the next step begin anew, as steps of another kind came between."""
        self._last = None

    def best(self, rows: int, choices: Sequence[tuple[int, float]]) -> int | None:
        """Return which choice gives a step of `rows` sequences the most tokens a second, if any.

        A choice is a number of guesses, and how many of them will be right. None: the step does
        better without. Steps without drafts are measured first, then those with.
        """
        plain = self._plain.get(rows.bit_length(), ())
        if len(plain) < _FEW:
            return None
        account, usual = self._account(rows), statistics.median(plain)
        curve, share = self._curve(rows, usual), account.share
        best, most = None, _MARGIN * rows / usual
        for index, (count, expected) in enumerate(() if account.loses else choices):
            rate = (rows + share * expected) / _seconds(curve, rows + count)
            if rate > most:
                best, most = index, rate
        self._decide(rows, best is not None)
        return best

    def rest(self, rows: int) -> bool:
        """Return whether drafts are not to be looked for, as those of late cost more than they won.

        This is a decision against drafts.
        """
        loses = self._account(rows).loses
        if loses:
            self._decide(rows, False)
        return loses

    def _account(self, rows: int) -> _Account:
        account = self._accounts.get(rows.bit_length())
        if account is None:
            account = self._accounts[rows.bit_length()] = _Account()
        return account

    def _decide(self, rows: int, paid: bool) -> None:
        """Count a decision; forget what was not chosen for long, as it may have changed."""
        account = self._account(rows)
        if not paid and account.refuse():
            self._drafted.clear()
        elif paid and account.pay():
            del self._plain[rows.bit_length()]
            last = None if self._last is None else self._last[0]
            self._drafted = {kind: t for kind, t in self._drafted.items() if t is last}

    def _curve(self, rows: int, usual: float) -> list[tuple[float, float]]:
        """Return tokens and seconds of steps that were measured, by tokens, first the plain one."""
        points = [(float(rows), usual)]
        for _, times in sorted(self._drafted.items()):
            tokens = statistics.fmean(count for count, _ in times)
            if len(times) >= _FEW and tokens > points[-1][0]:
                points.append((tokens, statistics.median(seconds for _, seconds in times)))
        return points


def _seconds(curve: Sequence[tuple[float, float]], num_tokens: int) -> float:
    """Return the time on the line through the nearest points; no step is faster than the first."""
    if len(curve) == 1:
        return curve[0][1]
    index = 1
    while index < len(curve) - 1 and curve[index][0] < num_tokens:
        index += 1
    (left, low), (right, high) = curve[index - 1 : index + 1]
    return max(curve[0][1], low + (high - low) * (num_tokens - left) / (right - left))
