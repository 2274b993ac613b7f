"""The keys file, in two forms, and what its mode must be.

Lines of JSON with hashed keys, as `python -m serving.http.access.keys new ID` prints them:
    {"id": "team-a", "hash": "sha256:SALT:DIGEST", "adapters": ["sql"], "weight": 2}
Several lines of one id are several keys of it, for rotation: they differ in `hash`, `not_before`
and `expires` only. YAML with plain keys, `KEY: {id: team-a, adapters: [sql]}`, takes the same
fields; such a file must be readable by its owner only.
"""

import dataclasses
import datetime
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from serving.http.access.key_hash import HASH, KEY_ID
from serving.http.settings import ROLES, KeyLimits, Tenant

_MOST_BYTES = 4 << 20
_FIELDS = {"id", "adapters", "rate", "salt", "roles", "weight", "limits", "not_before", "expires"}
_LIMITS = {field.name for field in dataclasses.fields(KeyLimits)}


def read_keys_file(path: str | Path) -> tuple[Tenant, ...]:
    """Return the keys of a file. ValueError names an entry by its place, never by its key."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError(f"The keys file must be a plain file of at most {_MOST_BYTES} bytes.")
        text = file.read(_MOST_BYTES + 1).decode()
    _check_not_written(status)
    if _is_lines(text):
        tenants = _read_lines(text)
    else:
        tenants = _read_yaml(text)
        _check_not_read(status)
    _check_same(tenants)
    return tenants


def _check_not_written(status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise ValueError(
            f"Others may change the keys file (mode {stat.S_IMODE(status.st_mode):o}, owner "
            f"{status.st_uid}): it must belong to this user or root, without write for others."
        )


def _check_not_read(status: os.stat_result) -> None:
    if status.st_mode & 0o077:
        raise ValueError(
            f"The keys file holds plain keys and others may read it (mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod 600, or use hashed keys "
            "(python -m serving.http.access.keys new ID)."
        )


def _is_lines(text: str) -> bool:
    first = next(iter(_lines(text)), (0, ""))[1]
    try:
        entry = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and ("hash" in entry or "id" in entry)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _read_lines(text: str) -> tuple[Tenant, ...]:
    tenants = []
    for number, line in _lines(text):
        where = f"Keys file, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: not a JSON object.")
        hashed = entry.pop("hash", None)
        if not isinstance(hashed, str) or not HASH.fullmatch(hashed):
            raise ValueError(f"{where}: hash must be sha256:SALT:DIGEST.")
        if "id" not in entry:
            raise ValueError(f"{where}: id is missing.")
        tenants.append(_tenant(where, entry, hash=hashed))
    return tuple(tenants)


def _read_yaml(text: str) -> tuple[Tenant, ...]:
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ValueError("The keys file is neither YAML nor lines of JSON.") from None
    if not isinstance(content, dict) or not content:
        raise ValueError("The keys file must map each API key to what it may do.")
    tenants = []
    for number, (key, entry) in enumerate(content.items(), 1):
        where, entry = f"Keys file, entry {number}", {} if entry is None else entry
        if not isinstance(key, str) or not isinstance(entry, dict):
            raise ValueError(f"{where}: the key must be text, its value a mapping.")
        tenants.append(_tenant(where, entry, key=key))
    return tuple(tenants)


def _tenant(where: str, entry: dict[str, Any], **secret: str) -> Tenant:
    """Return the key of one entry; `secret` is its `key` or its `hash`."""
    unknown = set(entry) - _FIELDS
    if unknown:
        raise ValueError(f"{where}: unknown field {sorted(map(str, unknown))[0]}.")

    def field(name: str, check: Callable[[Any], Any], what: str) -> Any:
        try:
            return check(entry[name])
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"{where}: {name} must be {what}.") from None

    checks: dict[str, tuple[Callable[[Any], Any], str]] = {
        "id": (_id, "1 to 64 letters, digits, '_' or '-'"),
        "adapters": (_names, "a list of names"),
        "rate": (_rate, "in (0, 1e6]"),
        "salt": (_text, "text"),
        "roles": (_roles, f"a list of {', '.join(ROLES)}"),
        "weight": (_weight, "in [0.001, 1000]"),
        "limits": (_limits, f"a mapping of {', '.join(sorted(_LIMITS))} to positive numbers"),
        "not_before": (_time, "a time such as 2030-01-31T00:00:00Z"),
        "expires": (_time, "a time such as 2030-01-31T00:00:00Z"),
    }
    given = {n: field(n, *checks[n]) for n in entry if entry[n] is not None or n == "id"}
    return Tenant(**secret, **given)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


def _id(value: Any) -> str:
    _require(isinstance(value, str) and KEY_ID.fullmatch(value) is not None)
    return value


def _names(value: Any) -> frozenset[str]:
    _require(isinstance(value, list) and all(isinstance(name, str) for name in value))
    return frozenset(value)


def _roles(value: Any) -> frozenset[str]:
    roles = _names(value)
    _require(bool(roles) and roles <= set(ROLES))
    return roles


def _text(value: Any) -> str:
    _require(isinstance(value, str) and bool(value))
    return value


def _number(value: Any, low: float, high: float) -> float:
    _require(isinstance(value, int | float) and not isinstance(value, bool))
    _require(low <= value <= high)
    return value


def _rate(value: Any) -> float:
    _require(value != 0)
    return _number(value, 5e-324, 1e6)


def _weight(value: Any) -> float:
    return float(_number(value, 0.001, 1000))


def _limits(value: Any) -> KeyLimits:
    _require(isinstance(value, dict) and set(value) <= _LIMITS)
    return KeyLimits(**value)


def _time(value: Any) -> float:
    """Return the unix time of a time in ISO 8601; without a zone it is UTC."""
    if isinstance(value, str):
        value = datetime.datetime.fromisoformat(value)
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time())
    if isinstance(value, datetime.datetime):
        zone = value.tzinfo or datetime.UTC
        return value.replace(tzinfo=zone).timestamp()
    return float(_number(value, 0, 1e12))


def _check_same(tenants: Iterable[Tenant]) -> None:
    """Raise ValueError where keys of one id differ in what they may do."""
    seen: dict[str, Tenant] = {}
    for tenant in tenants:
        same = dataclasses.replace(tenant, key="", hash="", not_before=None, expires=None)
        if tenant.id and seen.setdefault(tenant.id, same) != same:
            raise ValueError(
                f"Keys file: the keys of {tenant.id!r} must differ in hash, not_before and "
                "expires only."
            )
