"""The record of a measurement, which every bench writes: command, date, commit, machine, results.

The keys of `about` come first in the JSON file, and the bench's own follow.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def host() -> str:
    """Return the name of this machine as a device, such as "x86_64 CPU, 2 cores"."""
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def processor() -> str:
    """Return what /proc/cpuinfo calls the processor, or what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(": ")[1] for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def jax_device() -> str:
    """Return the kind of the first device of jax; `host()` where that is the CPU."""
    import jax  # here, so that a bench without jax stays without it

    device = jax.devices()[0]
    return host() if device.platform == "cpu" else device.device_kind


def need_gpu(instead: str = "") -> None:
    """End the command where jax sees no GPU; `instead` says what runs on a CPU."""
    if jax_device() == host():
        raise SystemExit(f"This bench needs an NVIDIA GPU, and jax sees none. {instead}".rstrip())


def gpu() -> str:
    """Return the name of the first GPU as nvidia-smi tells it; `host()` where there is none."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return host()
    return text.splitlines()[0].strip()


def in_file_name(device: str) -> str:
    """Return a device as it stands in the names of result files: "cpu", "nvidia_h200"."""
    return "cpu" if device == host() else device.lower().replace(" ", "_")


def command(argv: Sequence[str] | None = None) -> str:
    """Return the command line of this run. Of an absolute path only the last part is told."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    words = sys.argv[1:] if argv is None else argv
    return shlex.join(["python", "-m", module, *map(_without_folders, words)])


def _without_folders(word: str) -> str:
    flag, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    return flag + equals + (os.path.basename(value.rstrip("/")) if value[:1] == "/" else value)


def commit() -> str | None:
    """Return the commit of the measured code, with "+" if files differ; None without git."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return name + ("+" if changed else "")


def _git(*words: str) -> str:
    git = ["git", "-C", str(_ROOT), *words]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def about(device: str | None = None) -> dict[str, Any]:
    """Return the head of a record. Call it before the measurement: it reads the load average.

    Args:
        device: what was measured; None for the CPU of this machine.
    """
    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "device": device or host(),
        "processor": processor(),
        "load_average": os.getloadavg()[0],
        "jax": importlib.metadata.version("jax"),
    }


def write(file: Path, record: Mapping[str, Any]) -> None:
    """Write a record into its JSON file, which is whole at any time. The folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(file)
