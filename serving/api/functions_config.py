"""Configuration of isolated functions behind one command. No jax."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.api.config import EngineConfig

_KEEP_ALIVE_S = 300.0
_FOLDER, _PREFIX = "functions", "functions_"
_SECONDS = {"keep_alive_s": 1e9, "ttft_slo_s": 1e6, "verify_s": 1e6}  # the most of each
ISOLATIONS = ("none", "server", "process")
# Sizes of one function, where nothing else is asked for.
FIELDS: dict[str, Any] = {
    "max_loras": 1,
    "structured_outputs": False,
    "enable_prefix_caching": True,
    "max_num_seqs": 16,
}


@dataclasses.dataclass(frozen=True)
class FunctionsConfig:
    """Functions of one host; a value out of bounds is a ValueError naming the flag."""

    functions: str | None = None  # folder of adapters, each one a function; None: no functions
    functions_keep_alive_s: float = _KEEP_ALIVE_S  # without calls, until a function's process ends
    functions_memory_bytes: int | None = None  # of all functions' processes together
    functions_ttft_slo_s: float | None = None  # to a first token; None: 5 times a measured prefill
    functions_isolation: str = "process"  # one of ISOLATIONS
    functions_max_tenants: int | None = None  # of isolation server and none; None: 16
    functions_verify_s: float | None = None  # between two hashes of the backbone; None: never

    def __post_init__(self) -> None:
        names = (field.name for field in dataclasses.fields(self) if field.name != _FOLDER)
        check_options({name: getattr(self, name) for name in names})
        given = [
            f"--{field.name.replace('_', '-')}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        if self.functions is None and given:
            raise ValueError(
                f"{', '.join(given)} must go with --functions: add it with the folder of "
                "adapters, or leave them out."
            )


def check_options(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a value out of bounds, or that contradicts another one.

    `given` are an agent's options by name, with or without the prefix of the flags; the error has
    the name that was given.
    """
    names = {name.removeprefix(_PREFIX): name for name in given}
    values = {short: given[name] for short, name in names.items()}
    for short, most in _SECONDS.items():
        value = values[short]
        if value is not None and not (_is_number(value, int | float) and 0 < value <= most):
            raise ValueError(f"{names[short]} must be in (0, {most:g}] seconds, got {value!r}.")
    for short, least, most in (("memory_bytes", 1, 1 << 62), ("max_tenants", 1, 256)):
        value = values[short]
        if value is not None and not (_is_number(value, int) and least <= value <= most):
            bound = f"in {least}..{most}" if short == "max_tenants" else f"at least {least}"
            raise ValueError(f"{names[short]} must be an integer {bound}, got {value!r}.")
    level = values["isolation"]
    if level not in ISOLATIONS:
        allowed = ", ".join(ISOLATIONS)
        raise ValueError(f"{names['isolation']} must be one of {allowed}, got {level!r}.")
    if level == "process" and values["max_tenants"] is not None:
        raise ValueError(
            f"{names['max_tenants']} is a size of {names['isolation']} server or none: leave it "
            f"out, or set {names['isolation']}."
        )
    if level != "process" and values["ttft_slo_s"] is not None:
        raise ValueError(
            f"{names['ttft_slo_s']} gives functions turns; with {names['isolation']} {level} one "
            "engine batches them all: leave it out."
        )


def _check_names(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is no field of EngineConfig, with one that is near."""
    known = EngineConfig.__dataclass_fields__
    unknown = sorted(fields.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ", whose fields are the sizes."
        raise ValueError(f"{unknown[0]!r} is no field of EngineConfig{hint}")


def checked_fields(model: str, dtype: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of EngineConfig that all functions have: FIELDS, and those given.

    Raises ValueError for a folder without a model, and for a field or a value that is none.
    """
    if not Path(model, "config.json").is_file():
        raise ValueError(f"Cannot share {model}: there is no config.json.")
    _check_names(fields)
    checked: dict[str, Any] = {**FIELDS, **fields} | ({} if dtype is None else {"dtype": dtype})
    EngineConfig(model, **checked)
    return checked


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
