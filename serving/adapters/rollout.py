"""Rollout of an adapter's versions: shares of the users, and the way back. Pure functions. No jax.

A user has a fixed bucket of 10,000. Newer versions own the lower buckets, so that a raised share
of a new version moves users to it and none away from it.
"""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from lora_jax.adapters.versions import NAME
from serving.adapters.rollout_guard import Guard, guard_of

BUCKETS = 10_000
MOST_VERSIONS = 16  # in one rollout
_MOST_HISTORY = 16  # states; older ones are forgotten
ROLLOUT, ROLLBACK = "rollout", "rollback"  # why a state came to be, or a guard's own words


class NoWayBack(ValueError):
    """There is no earlier state to return to; nothing was changed."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """One state: buckets of each version, the oldest version first; they sum to BUCKETS."""

    buckets: Mapping[str, int]
    guard: Guard | None = None
    since: float = 0.0  # unix time
    why: str = ROLLOUT
    request_id: str = ""  # of the call that made it

    @property
    def served(self) -> tuple[str, ...]:
        """Versions with a share, the oldest first."""
        return tuple(version for version, count in self.buckets.items() if count)

    @property
    def newest(self) -> str:
        """The newest version with a share."""
        return self.served[-1]

    def as_json(self) -> dict[str, Any]:
        """Return the state as the routes and the file have it; shares in percent."""
        return {
            "versions": {version: count / 100 for version, count in self.buckets.items()},
            "guard": None if self.guard is None else self.guard.as_json(),
            "since": self.since,
            "why": self.why,
            "request_id": self.request_id,
        }


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Versions of one adapter name, with the states before; `revision` counts changes."""

    now: Shares
    history: tuple[Shares, ...] = ()  # the oldest first
    revision: int = 1

    @property
    def standby(self) -> str | None:
        """The version that a rollback would bring back, or that was last taken to 0."""
        for state in reversed(self.history):
            gone = [version for version in state.served if version not in self.now.served]
            if gone:
                return gone[-1]
        return None

    def as_json(self) -> dict[str, Any]:
        """Return the state and the history, as the routes and the file have them."""
        past = [state.as_json() for state in self.history]
        return {**self.now.as_json(), "revision": self.revision, "history": past}


def bucket_of(adapter: str, key: str) -> int:
    """Return the bucket of a user: SHA-256(adapter | key) mod BUCKETS, in every process."""
    digest = hashlib.sha256(f"{adapter}|{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest, "big") % BUCKETS


def version_at(state: Shares, bucket: int) -> str:
    """Return the version that owns a bucket: the newest version owns the lowest ones.

    Raises ValueError for a bucket at or after BUCKETS.
    """
    for version in reversed(list(state.buckets)):
        bucket -= state.buckets[version]
        if bucket < 0:
            return version
    raise ValueError(f"bucket {bucket} is not in [0, {BUCKETS - 1}]")


def rolled_out(
    old: Rollout | None,
    shares: Mapping[str, Any],
    *,
    known: Collection[str],
    guard: Mapping[str, Any] | Guard | Literal["keep"] | None = "keep",
    now: float = 0.0,
    request_id: str = "",
) -> Rollout:
    """Return the rollout after shares in percent were set; versions left out have none.

    The guard of the state before stays unless one is given, or None for no guard. A version is new
    where the rollout has not had it before; of several new ones the one with the larger share is
    the older. Raises ValueError for unknown versions and for shares that are no
    numbers from 0 to 100 with at most two decimals, or do not sum to 100.
    """
    buckets = _buckets(shares, known)
    order = [] if old is None else _order(old)
    new = [version for version in buckets if version not in order]
    order += sorted(new, key=lambda version: -buckets[version])  # stable
    kept = {version: buckets.get(version, 0) for version in order if version in known}
    idle = [version for version, count in kept.items() if not count]
    for version in idle[: max(0, len(kept) - MOST_VERSIONS)]:  # the oldest
        del kept[version]
    if guard == "keep":
        guard = None if old is None else old.now.guard
    checked = guard if guard is None or isinstance(guard, Guard) else guard_of(guard)
    return _after(old, Shares(kept, checked, now, ROLLOUT, request_id))


def rolled_back(
    old: Rollout, *, known: Collection[str], now: float = 0.0, why: str = ROLLBACK, by: str = ""
) -> Rollout:
    """Return the rollout without its newest version: the last state of older versions alone.

    Without such a state the older versions of the last state that had some take over, and the next
    older one gets the share. `known` versions can be served. Raises NoWayBack without any.
    """
    bad = old.now.newest
    position = [*old.now.buckets].index(bad)
    older = set([*old.now.buckets][:position]) & set(known)
    for state in reversed(old.history):
        if older.issuperset(state.served):
            buckets = {v: state.buckets.get(v, 0) for v in old.now.buckets}
            return _after(old, Shares(buckets, state.guard, now, why, by))
    for state in (old.now, *reversed(old.history)):
        left = [version for version in state.served if version in older]
        if left:
            buckets = {v: state.buckets[v] if v in left else 0 for v in old.now.buckets}
            buckets[left[-1]] += BUCKETS - sum(buckets.values())
            return _after(old, Shares(buckets, state.guard, now, why, by))
    raise NoWayBack(
        f"there is no earlier version than {bad!r} to return to; load one and give it a share."
    )


def rollout_of(said: Mapping[str, Any]) -> Rollout:
    """Return what `Rollout.as_json` gave. Raises ValueError, KeyError or TypeError for the rest."""
    revision = said["revision"]
    if isinstance(revision, bool) or not isinstance(revision, int) or revision < 1:
        raise ValueError(f"revision {revision!r}")
    return Rollout(_shares_of(said), tuple(map(_shares_of, said["history"])), revision)


def _after(old: Rollout | None, state: Shares) -> Rollout:
    if old is None:
        return Rollout(state)
    return Rollout(state, (*old.history, old.now)[-_MOST_HISTORY:], old.revision + 1)


def _order(old: Rollout) -> list[str]:
    """Return all versions that the rollout has had, the oldest first."""
    order = list(old.now.buckets)
    for state in old.history:
        order = [version for version in state.buckets if version not in order] + order
    return order


def _buckets(shares: Mapping[str, Any], known: Iterable[str]) -> dict[str, int]:
    """Return checked shares as numbers of buckets."""
    known = set(known)
    if not isinstance(shares, Mapping):
        raise ValueError(
            f'versions must be a mapping, as {{"v1": 95, "v2": 5}}, not {shares!r:.80}.'
        )
    if not shares:
        raise ValueError("versions must name at least one version with its share in percent.")
    if len(shares) > MOST_VERSIONS:
        raise ValueError(f"a rollout has at most {MOST_VERSIONS} versions, got {len(shares)}.")
    buckets = {}
    for version, share in shares.items():
        if version not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ValueError(f"there is no version {str(version)[:64]!r}; loaded: {listed}.")
        buckets[version] = _bucket_count(version, share)
    total = sum(buckets.values())
    if total != BUCKETS:
        raise ValueError(f"the shares must sum to 100, got {total / 100:g}.")
    return buckets


def _bucket_count(version: str, share: Any) -> int:
    number = not isinstance(share, bool) and isinstance(share, int | float)
    if not number or not math.isfinite(share) or not 0 <= share <= 100:
        raise ValueError(f"the share of {version!r} must be a number in [0, 100], got {share!r}.")
    count = round(share * 100)
    if abs(count - share * 100) > 1e-6:
        raise ValueError(f"the share of {version!r} has more than two decimals: {share!r}.")
    return count


def _shares_of(state: Mapping[str, Any]) -> Shares:
    buckets = {version: _bucket_count(version, s) for version, s in state["versions"].items()}
    if sum(buckets.values()) != BUCKETS or not all(map(NAME.fullmatch, buckets)):
        raise ValueError("versions")
    guard = None if state["guard"] is None else guard_of(state["guard"])
    since, why, by = state["since"], state["why"], state["request_id"]
    if not isinstance(since, int | float) or not isinstance(why, str) or not isinstance(by, str):
        raise ValueError("a state's since, why or request_id")
    return Shares(buckets, guard, since, why, by)
