"""The server of `make serve`, started once for the commands of pages and for clients."""

import shlex
import subprocess
from collections.abc import Iterator

import pytest
from support.processes.server_process import ROOT, serve

# What pages add, and few programs.
ADDED = "--enable-runtime-lora --lora-modules law-esft=assets/tiny-moe/esft/gate-law"
ADDED += " --max-num-batched-tokens 32"


@pytest.fixture(scope="session")
def made_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of what `make serve` starts, with the options that the pages add."""
    ask = ["make", "--no-print-directory", "-n", "serve", f"ARGS={ADDED}"]
    lines = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    words = shlex.split(lines.strip().splitlines()[-1])
    words = words[["=" in word for word in words].index(False) :]  # without what it sets before
    assert words[1:3] == ["-m", "serving.launch"]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with serve(*words[3:], log=log) as url:
        yield url
