"""API keys: who calls, what they may see, how fast they may ask."""

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from serving.http.settings import HttpSettings, Tenant


@dataclasses.dataclass(frozen=True, eq=False)
class Caller:
    """Sender of a request. `adapters` None means every adapter; `salt` splits the prefix cache."""

    uses_model: bool = True
    is_admin: bool = False
    reads_metrics: bool = False
    adapters: frozenset[str] | None = None
    salt: str = ""
    bucket: "TokenBucket | None" = None

    def may_use(self, adapter: str) -> bool:
        """Return whether the adapter exists as far as this caller can tell."""
        return self.adapters is None or adapter in self.adapters


class TokenBucket:
    """Lets `rate` requests per second through, and as many as one second's worth at once."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic):
        self._rate, self._clock = rate, clock
        self._burst = max(1.0, rate)
        self._tokens, self._seen = self._burst, clock()

    def wait_s(self) -> float:
        """Take one token and return 0, or return the seconds until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._seen) * self._rate)
        self._seen = now
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._rate
        self._tokens -= 1.0
        return 0.0


class KeyRing:
    """Finds the caller of a key; without any key everybody is the same caller."""

    def __init__(self, settings: HttpSettings):
        self._callers: list[tuple[bytes, Caller]] = []
        for key in settings.api_keys:
            self._add(key, Caller(is_admin=not settings.admin_keys, salt=_salt(key)))
        for tenant in settings.tenants:
            self._add(tenant.key, _tenant_caller(tenant))
        for key in settings.admin_keys:
            self._add(key, Caller(is_admin=True, reads_metrics=True, salt=_salt(key)))
        for key in settings.metrics_keys:
            self._add(key, Caller(uses_model=False, reads_metrics=True))
        self.anonymous = Caller(
            uses_model=not settings.has_api_keys,
            is_admin=not settings.has_api_keys and not settings.admin_keys,
            reads_metrics=not settings.metrics_keys,
        )

    def _add(self, key: str, caller: Caller) -> None:
        self._callers.append((_digest(key), caller))

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key; the time taken does not tell how much of it was right."""
        digest = _digest(key)
        found = None
        for known, caller in self._callers:
            if secrets.compare_digest(known, digest):
                found = caller
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _salt(key: str) -> str:
    return hashlib.sha256(b"prefix-cache salt of " + key.encode()).hexdigest()[:32]


def _tenant_caller(tenant: Tenant) -> Caller:
    salt = _salt(tenant.key) if tenant.salt is None else f"tenant {tenant.salt}"
    bucket = None if tenant.rate is None else TokenBucket(tenant.rate)
    return Caller(adapters=tenant.adapters, salt=salt, bucket=bucket)


def read_keys_file(path: str | Path) -> tuple[Tenant, ...]:
    """Read a YAML file `KEY: {adapters: [NAME, ...], rate: REQUESTS_PER_SECOND, salt: TEXT}`.

    Every field may be left out: then all adapters, no limit, and a salt of the key's own. Tenants
    with the same salt share their prefix cache. A field that is not understood is a ValueError
    that names the entry by its place, never by its key.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" in line {place.line + 1}" if place is not None else ""
        raise ValueError(f"The keys file is not valid YAML{where}.") from None
    if not isinstance(content, dict) or not content:
        raise ValueError("The keys file must map each API key to what it may do.")
    return tuple(_tenant(i, key, entry) for i, (key, entry) in enumerate(content.items(), 1))


def _tenant(place: int, key: Any, entry: Any) -> Tenant:
    entry = {} if entry is None else entry
    if not isinstance(key, str) or not _is_text(key) or not isinstance(entry, dict):
        raise ValueError(f"Keys file, entry {place}: the key must be text, its value a mapping.")
    unknown = set(entry) - {"adapters", "rate", "salt"}
    if unknown:
        raise ValueError(f"Keys file, entry {place}: unknown field {sorted(map(str, unknown))[0]}.")
    adapters, rate, salt = (entry.get(field) for field in ("adapters", "rate", "salt"))
    if adapters is not None:
        if not isinstance(adapters, list) or not all(isinstance(a, str) for a in adapters):
            raise ValueError(f"Keys file, entry {place}: adapters must be a list of names.")
        adapters = frozenset(adapters)
    if rate is not None:
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not 0 < rate <= 1e6:
            raise ValueError(f"Keys file, entry {place}: rate must be in (0, 1e6].")
    if salt is not None and (not isinstance(salt, str) or not _is_text(salt)):
        raise ValueError(f"Keys file, entry {place}: salt must be text.")
    return Tenant(key, adapters, rate, salt)


def _is_text(value: str) -> bool:
    """Return whether a text is not empty and can be sent."""
    return value != "" and not any("\ud800" <= letter <= "\udfff" for letter in value)
