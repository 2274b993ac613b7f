"""API keys: their callers, permissions and limits.

`python -m serving.http.access.keys new ID` prints a new key, and the line for the keys file.
"""

import dataclasses
import hashlib
import hmac
import itertools
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lora_jax.adapters.host_memory.room import HostShare
from serving.api.request import Share
from serving.http.access.key_hash import id_of, is_key_of, new_key
from serving.http.access.rates import TokenBucket, TokenBudget
from serving.http.settings import HttpSettings, KeyLimits, Tenant


@dataclasses.dataclass(frozen=True, eq=False)
class Caller:
    """The sender of a request. `adapters` None means every adapter; `salt` parts the prefix cache.

    `id` names it in logs and counts; keys of one id are one caller.
    """

    uses_model: bool = True
    is_admin: bool = False
    reads_metrics: bool = False
    adapters: frozenset[str] | None = None
    salt: str = ""
    bucket: TokenBucket | None = None
    id: str = ""
    budget: TokenBudget | None = None
    share: Share = dataclasses.field(default_factory=Share)
    host_share: HostShare = dataclasses.field(default_factory=HostShare)

    def may_use(self, adapter: str) -> bool:
        """Return whether the adapter exists as far as this caller can tell."""
        return self.adapters is None or adapter in self.adapters


@dataclasses.dataclass(frozen=True)
class _Key:
    caller: Caller
    hash: str = ""
    not_before: float | None = None
    expires: float | None = None


class KeyRing:
    """Finds the caller of a key; without any key everybody is the same caller."""

    def __init__(self, settings: HttpSettings, now: Callable[[], float] = time.time):
        self._settings, self._now = settings, now
        self._secret = secrets.token_bytes(32)  # so that look-ups by dict tell nothing by time
        self._rates: dict[str, tuple[TokenBucket | None, TokenBudget | None]] = {}
        self._plain: dict[bytes, _Key] = {}
        self._hashed: dict[str, list[_Key]] = {}  # by id
        self.anonymous = Caller()
        self.set_tenants(settings.tenants)

    def set_tenants(self, tenants: Sequence[Tenant]) -> None:
        """Take these keys of the keys file from now on. ValueError: as for HttpSettings."""
        settings = dataclasses.replace(self._settings, tenants=tuple(tenants))
        if settings.has_api_keys != self._settings.has_api_keys:
            raise ValueError("The last key cannot be taken away while the server runs.")
        plain, hashed = self._plain_keys(settings), {}
        for number, tenant in enumerate(tenants, 1):
            caller = self._caller_of(tenant, tenant.id or f"tenant-{number}")
            key = _Key(caller, tenant.hash, tenant.not_before, tenant.expires)
            if tenant.hash:
                hashed.setdefault(tenant.id, []).append(key)
            else:
                plain[self._mark(tenant.key)] = key
        ids = {key.caller.id for key in itertools.chain(plain.values(), *hashed.values())}
        self._rates = {name: rates for name, rates in self._rates.items() if name in ids}
        self._settings, self._plain, self._hashed = settings, plain, hashed
        closed = settings.has_api_keys
        self.anonymous = Caller(
            uses_model=not closed,
            is_admin=not closed and not settings.has_admin_keys,
            reads_metrics=not closed and not settings.has_metrics_keys,
        )

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key that is valid now, else None."""
        return self.check(key)[0]

    def check(self, key: str) -> tuple[Caller | None, str]:
        """Return the caller, or None and why: unknown, early or expired.

        The time taken does not tell how much of a key was right.
        """
        plain = self._plain.get(self._mark(key))
        candidates = self._hashed.get(id_of(key), ())
        matching = [one for one in candidates if is_key_of(one.hash, key)]
        entry = plain or next(iter(matching), None)
        if entry is None:
            return None, "unknown"
        now = self._now()
        if entry.not_before is not None and now < entry.not_before:
            return None, "early"
        if entry.expires is not None and now >= entry.expires:
            return None, "expired"
        return entry.caller, ""

    def _plain_keys(self, settings: HttpSettings) -> dict[bytes, _Key]:
        """Return the keys that the command line gave."""
        entries: dict[bytes, _Key] = {}

        def add(role: str, keys: Sequence[str], **rights: bool) -> None:
            for number, key in enumerate(keys, 1):
                name = f"{role}-key-{number}"
                limits = settings.key_limits if role == "api" else KeyLimits()
                caller = self._caller(name, 1.0, limits, None)
                rights_ = {"salt": _salt(key), **rights}
                entries[self._mark(key)] = _Key(dataclasses.replace(caller, **rights_))

        add(
            "api",
            settings.api_keys,
            is_admin=not settings.has_admin_keys,
            reads_metrics=not settings.has_metrics_keys,
        )
        add("admin", settings.admin_keys, is_admin=True, reads_metrics=True)
        add("metrics", settings.metrics_keys, uses_model=False, reads_metrics=True)
        return entries

    def _caller_of(self, tenant: Tenant, name: str) -> Caller:
        limits = tenant.limits.over(self._settings.key_limits)
        salt = f"tenant {tenant.salt}" if tenant.salt else f"key id {name}"
        if not tenant.salt and not tenant.id:
            salt = _salt(tenant.key)
        return dataclasses.replace(
            self._caller(name, tenant.weight, limits, tenant.rate),
            uses_model=bool(tenant.roles & {"user", "admin"}),
            is_admin="admin" in tenant.roles,
            reads_metrics=bool(tenant.roles & {"metrics", "admin"}),
            adapters=tenant.adapters,
            salt=salt,
        )

    def _caller(self, name: str, weight: float, limits: KeyLimits, rate: float | None) -> Caller:
        bucket, budget = self._rates_of(name, rate, limits.tokens_per_minute)
        return Caller(
            id=name,
            bucket=bucket,
            budget=budget,
            share=Share(name, weight, limits.max_running, limits.max_waiting),
            host_share=HostShare(
                name, self._part(limits.max_adapters), self._part(limits.max_adapter_bytes)
            ),
        )

    def _part(self, limit: int | None) -> int | None:
        """Return an instance's part of a limit of host memory, rounded up: one adapter at least."""
        return None if limit is None else -(-limit // self._settings.num_instances)

    def _rates_of(
        self, name: str, rate: float | None, per_minute: float | None
    ) -> tuple[TokenBucket | None, TokenBudget | None]:
        """Return the counters of an id, the same ones as long as its rates stay."""
        bucket, budget = self._rates.get(name, (None, None))
        if (bucket.rate if bucket else None) != rate:
            bucket = None if rate is None else TokenBucket(rate)
        if (budget.per_minute if budget else None) != per_minute:
            budget = (
                None
                if per_minute is None
                else budget_of(name, per_minute, self._settings.budgets_folder)
            )
        self._rates[name] = bucket, budget
        return bucket, budget

    def _mark(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")


def budget_of(name: str, per_minute: float, folder: str | None) -> TokenBudget:
    """Return the tokens a minute of an id; processes that name the same folder share them."""
    if folder is None:
        return TokenBudget(per_minute)
    file = hashlib.sha256(name.encode()).hexdigest()[:32]
    return TokenBudget(per_minute, time.time, Path(folder, file))


def _salt(key: str) -> str:
    return hashlib.sha256(b"prefix-cache salt of " + key.encode()).hexdigest()[:32]


def main(argv: Sequence[str]) -> int:
    """Print a new key to stderr and its line for the keys file to stdout."""
    if len(argv) != 2 or argv[0] != "new":
        print("usage: python -m serving.http.access.keys new ID >> KEYS_FILE", file=sys.stderr)
        return 2
    try:
        key, hashed = new_key(argv[1])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"The key, which is shown this once: {key}", file=sys.stderr)
    print(json.dumps({"id": argv[1], "hash": hashed}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
