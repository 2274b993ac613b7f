"""Facts that all processes of one model must share: versions, the model, flags. No jax."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serving.api.config import GIVEN_MODULES, EngineConfig
from serving.runtime.code_files import code_digest

# Bytes of the weights that are compared: so many at so many places of each file, of all files at
# least so many places. Another model of the same sizes has other bytes at nearly all of them.
_SAMPLE, _PLACES, _ALL_PLACES = 4096, 64, 1024
# Fields that may differ: places of a host's own files, and what rank 0 alone reads.
_OWN = ("model", "lora_dir", "chat_template", "generation_config", "otlp_traces_endpoint")
# Variables that change what programs compute, or which kernels they have.
_OF_PROGRAMS = ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "LORA_JAX_OPS")


def about_of(config: EngineConfig) -> dict[str, Any]:
    """Return what must be equal in all processes, by the name that a refusal gives it.

    Of the model's files these are config.json, names and sizes of the weights, and samples of them.
    Raises OSError for a file that cannot be read.
    """
    folder = Path(config.model)
    files = sorted(folder.glob("*.safetensors"))
    sizes = [(file.name, file.stat().st_size) for file in files]
    digest = hashlib.sha256((folder / "config.json").read_bytes() + repr(sizes).encode())
    for file, (_, size) in zip(files, sizes, strict=True):
        _add_samples(digest, file, size, max(_PLACES, _ALL_PLACES // len(files)))
    about = {f"version of {name}": version(name) for name in ("lora-jax", "jax", "jaxlib")}
    about["version of lora-jax"] += f" (code {code_digest()[:12]})"  # a checkout keeps its number
    about["the model (config.json, sizes and samples of its weights)"] = digest.hexdigest()[:16]
    fields = dataclasses.asdict(config)
    if fields["lora_target_modules"] == GIVEN_MODULES:  # only where this command names adapters
        fields["lora_target_modules"] = None
    flags = {f"--{name.replace('_', '-')}": fields[name] for name in fields if name not in _OWN}
    return about | {flag: repr(value) for flag, value in flags.items()}


def _add_samples(digest: "hashlib._Hash", path: Path, size: int, places: int) -> None:
    """Add a file's bytes at places all over it, or all of a small file."""
    with path.open("rb", buffering=0) as file:
        for place in range(places):
            file.seek(place * size // places)
            digest.update(file.read(min(_SAMPLE, -(-size // places))))


def environment_of(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that must be equal in all processes, "" for one that is not set.

    With others each process would compile other programs, whose results have other bits.
    """
    return {f"the variable {name}": environ.get(name, "") for name in _OF_PROGRAMS}


def difference(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], here: str, there: str = "there"
) -> str | None:
    """Return what differs between this process and another, None for nothing."""
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r} {there} and {ours.get(name)!r} {here}"
    return None
