"""A real server in its own process, for tests that talk to it as users do."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.processes.compiler import as_shipped

ROOT = Path(__file__).parents[3]
START_S = 600  # a cold start beside three busy workers takes minutes


_LOWEST = 20_000  # below are those of Ray's workers
_kept: list[int] = []  # descriptors that keep this process's ports


def free_port() -> int:
    """Return a TCP port that nobody listens on, and no other caller gets while this process lives.

    The kernel gives it to nobody who asks for any port: a server may take seconds to listen on it.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    highest = int(given[0]) if int(given[0]) > _LOWEST + 1000 else 60_000
    for port in random.SystemRandom().sample(range(_LOWEST, highest), 500):
        with socket.socket(socket.AF_UNIX) as kept, socket.socket() as tried:
            try:
                kept.bind(f"\0port {port} of a test of lora-jax")
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            _kept.append(kept.detach())
            return port
    raise RuntimeError(f"no port between {_LOWEST} and {highest} is free")


@contextlib.contextmanager
def serve(*args: str, log: Path, shipped: bool = False) -> Iterator[str]:
    """Start `python -m serving.launch ARGS`, wait until it is healthy, yield its base URL.

    A `shipped` one compiles as a user's does, also where the tests compile fast.
    """
    with serve_process(*args, log=log, shipped=shipped) as (_, port):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def serve_process(
    *args: str, log: Path, shipped: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """As `serve`, but yield the process and its port."""
    port = free_port()
    env = (as_shipped(os.environ) if shipped else os.environ) | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "serving.launch", *args, "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process, log)
            yield process, port
        finally:
            process.terminate()
            process.wait(timeout=120)


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once /health answers 200; fail with the log when the process dies first."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"server exited with {process.returncode}:\n{log.read_text()}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise TimeoutError(f"server not healthy after {START_S} s:\n{log.read_text()}")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST JSON and return the JSON answer; an error status raises with its body."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from error
