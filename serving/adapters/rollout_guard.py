"""Guard of a rollout: limits that the newest version must keep, over what was seen. No jax."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

_LEAST_REQUESTS = 20  # where a guard does not say how many


@dataclasses.dataclass(frozen=True)
class Guard:
    """Limits; None: not looked at.

    Nothing is judged before `min_requests` have ended, but a rate that is broken whatever the rest
    of them will do is broken at once.
    """

    min_requests: int = _LEAST_REQUESTS
    error_rate: float | None = None  # most requests that fail, 0 to 1
    length_rate: float | None = None  # most answers that end at max_tokens, 0 to 1
    ttft_s: float | None = None  # longest mean time to the first token
    mean_logprob: float | None = None  # least mean of answers' tokens, where they were asked for

    def as_json(self) -> dict[str, Any]:
        """Return the limits that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of one request."""

    failed: bool = False
    at_length: bool = False
    ttft_s: float | None = None
    logprob_sum: float = 0.0
    num_logprobs: int = 0


# Called with the adapter, the outcome and the digest of the files that answered.
Finished = Callable[[str | None, Outcome, str | None], None]


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Sums over the ended requests of one version."""

    requests: int = 0
    errors: int = 0
    at_length: int = 0
    ttft_sum_s: float = 0.0
    num_ttft: int = 0
    logprob_sum: float = 0.0
    num_logprobs: int = 0

    def plus(self, one: Outcome) -> "Outcomes":
        """Return the sums with one more request."""
        return Outcomes(
            self.requests + 1,
            self.errors + one.failed,
            self.at_length + one.at_length,
            self.ttft_sum_s + (one.ttft_s or 0.0),
            self.num_ttft + (one.ttft_s is not None),
            self.logprob_sum + one.logprob_sum,
            self.num_logprobs + one.num_logprobs,
        )


def guard_of(said: Any) -> Guard:
    """Return a guard of its JSON; ValueError names the field that is wrong and what it may be."""
    if not isinstance(said, Mapping):
        raise ValueError("guard must be an object.")
    fields = [field.name for field in dataclasses.fields(Guard)]
    unknown = next((str(name)[:64] for name in said if name not in fields), None)
    if unknown is not None:
        raise ValueError(f"guard has no {unknown!r}; it has {', '.join(fields)}.")
    given = {name: value for name, value in said.items() if value is not None}
    for name, value in given.items():
        _check(name, value)
    if given.keys() <= {"min_requests"}:
        raise ValueError(f"guard needs a limit: one of {', '.join(fields[1:])}.")
    return Guard(**given)


_RANGES: dict[str, tuple[float, float]] = {
    "error_rate": (0, 1),
    "length_rate": (0, 1),
    "ttft_s": (0, 1e6),
    "mean_logprob": (-1e3, 0),
}


def _check(name: str, value: Any) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if name == "min_requests":
        if not number or not isinstance(value, int) or not 1 <= value <= 10**9:
            raise ValueError(f"guard.min_requests must be an integer of at least 1, got {value!r}.")
        return
    low, high = _RANGES[name]
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"guard.{name} must be a number in [{low:g}, {high:g}], got {value!r}.")


def broken(guard: Guard, seen: Outcomes) -> str | None:
    """Return which limit the version has broken, with its numbers; None while it keeps them."""
    enough = seen.requests >= guard.min_requests
    after = f"after {seen.requests} requests"
    for name, count in (("error_rate", seen.errors), ("length_rate", seen.at_length)):
        limit, rate = getattr(guard, name), count / max(seen.requests, 1)
        if limit is not None and count > limit * max(seen.requests, guard.min_requests):
            return f"{name} {rate:.4g} is over {limit:g} {after}"
    if enough and guard.ttft_s is not None and seen.num_ttft:
        mean = seen.ttft_sum_s / seen.num_ttft
        if mean > guard.ttft_s:
            return f"ttft_s {mean:.4g} is over {guard.ttft_s:g} {after}"
    if enough and guard.mean_logprob is not None and seen.num_logprobs:
        mean = seen.logprob_sum / seen.num_logprobs
        if mean < guard.mean_logprob:
            return f"mean_logprob {mean:.4g} is under {guard.mean_logprob:g} {after}"
    return None
