"""The shipped default behind HTTP, for every client's test."""

from pathlib import Path

import pytest
from support.processes.server_process import ROOT

MODEL = ROOT / "assets" / "tiny-moe"


@pytest.fixture(scope="session")
def server(made_server: str) -> str:
    """Base URL of a server with the shipped model and its adapters."""
    return made_server


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Folder of the served model: its tokenizer is the clients' tokenizer."""
    return MODEL


@pytest.fixture(scope="session")
def adapters() -> list[str]:
    """Names of the shipped adapters."""
    return sorted(p.name for p in (MODEL / "adapters").iterdir() if p.is_dir())
