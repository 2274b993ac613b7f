"""Installation of this package, without which its kernels for GPUs and NPUs are not found. No jax.

A checkout can be imported, but entry points and the version are in what an installation writes.
"""

import importlib.metadata

NAME = "lora-jax"


def check_installed() -> None:
    """Raise ValueError, which says what to run, where the code is that of a bare checkout."""
    try:
        importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"{NAME} is not installed for this Python, so that its kernels for GPUs are not found: "
            "run `python -m pip install -e .` in the checkout, with [cuda] behind the dot on a "
            "host with NVIDIA GPUs."
        ) from None
