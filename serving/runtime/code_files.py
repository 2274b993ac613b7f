"""The files of code that programs and commands between processes come from. No jax."""

import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterator

_PACKAGES = "lora_jax", "serving", "cuda_backend"
_CODE = ".py", ".cc", ".h", ".cu", ".cuh", ".json"  # tuned sizes of kernels are in JSON


@functools.cache
def code_digest() -> str:
    """Return a digest of the code that programs are traced from."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = os.path.dirname(spec.origin)
        for name in sorted(_code_files(root)):
            with open(os.path.join(root, name), "rb", buffering=0) as file:
                data = file.read()
            digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def _code_files(root: str) -> Iterator[str]:
    """Return files of code below a folder by their names in it; pathlib would take longer than all
    reads.
    """
    for folder, _, names in os.walk(root):
        inside = folder[len(root) + 1 :]
        yield from (os.path.join(inside, name) for name in names if name.endswith(_CODE))
