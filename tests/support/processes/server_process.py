"""A real server in its own process, for tests that talk to it as users do."""

import contextlib
import itertools
import json
import os
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


_FIRST_PORT = 10_240
_numbers = itertools.count(97 * os.getpid())  # processes begin at different ones


def free_port() -> int:
    """A TCP port that nobody listens on, and that the kernel gives to nobody who asks for any.

    A server is started first and takes its port seconds later. One of the kernel's own choice may
    be another process's by then.
    """
    own = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    count = int(own[0]) - _FIRST_PORT
    assert count > 0, "the kernel gives away all ports"
    for _ in range(count):
        port = _FIRST_PORT + next(_numbers) % count
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


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
