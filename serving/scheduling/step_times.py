"""Seconds of steps that only decode, as a line over their rows. No jax."""

_SHARE = 1 / 64  # of a new step in the means
_LEAST_SPREAD = 1.0  # variance of the rows below which no slope is seen
_LEAST_PART = 1 / 8  # of a step, at least: so a wait always earns credit


class StepTimes:
    """Fit of seconds = fixed + rows * seconds of a row, in which older steps count less."""

    def __init__(self):
        self._count = 0
        self._other_s = 0.0  # mean of steps with prompts, the first one's until there are more
        self._rows = self._seconds = self._squares = self._products = 0.0  # means

    def note(self, num_rows: int, seconds: float) -> None:
        """Take in a step."""
        self._count += 1
        share = max(_SHARE, 1 / self._count)
        self._rows += share * (num_rows - self._rows)
        self._seconds += share * (seconds - self._seconds)
        self._squares += share * (num_rows**2 - self._squares)
        self._products += share * (num_rows * seconds - self._products)

    def note_other(self, seconds: float) -> None:
        """Take in a step with prompts, which counts until one that only decodes has run."""
        self._other_s += (_SHARE if self._other_s else 1.0) * (seconds - self._other_s)

    @property
    def fixed_s(self) -> float:
        """The seconds of a step that do not depend on its rows, at least an eighth of them; all
        until more is known. Until such a step has run, an eighth of those with prompts.

        It is what each row that does not run costs those that do: they pay for it alone.
        """
        if not self._count:
            return _LEAST_PART * self._other_s
        spread = self._squares - self._rows**2
        if spread < _LEAST_SPREAD:
            return self._seconds
        slope = (self._products - self._rows * self._seconds) / spread
        fixed = max(_LEAST_PART * self._seconds, self._seconds - slope * self._rows)
        return min(self._seconds, fixed)
