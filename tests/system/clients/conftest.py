"""The shipped default behind HTTP, started once for every client's test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.server_process import ROOT, serve

MODEL = ROOT / "assets" / "tiny-moe"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a server with the shipped model and its adapters, and few programs."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    few = ["--max-num-batched-tokens", "32"]
    with serve(str(MODEL), "--lora-dir", str(MODEL / "adapters"), *few, log=log) as url:
        yield url


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """Folder of the served model: its tokenizer is the clients' tokenizer."""
    return MODEL


@pytest.fixture(scope="session")
def adapters() -> list[str]:
    """Names of the shipped adapters."""
    return sorted(p.name for p in (MODEL / "adapters").iterdir() if p.is_dir())
