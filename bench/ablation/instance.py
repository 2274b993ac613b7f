"""An LLM instance in a process of its own, without HTTP: jobs come in, times go out."""

import dataclasses
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from serving import Engine, FinishReason, Sampling
from serving.cluster.server_place import ServerPlace, server_access
from serving.lora_server.calls import Caller
from serving.role_gpu import use_gpu

_READY = "ready"


@dataclasses.dataclass(frozen=True)
class Told:
    """What became of a job; times are those of time.monotonic, which all processes share."""

    job: int
    first: float | None
    last: float
    tokens: int
    error: str | None


@dataclasses.dataclass(frozen=True)
class Setup:
    """How to start an instance."""

    number: int
    model: str
    adapters: dict[str, str]
    engine: dict[str, Any]  # fields of EngineConfig
    place: ServerPlace | None


class Instance:
    """A running instance; `on_told` is called on a thread."""

    def __init__(
        self,
        setup: Setup,
        serve_leases: Callable[[str, Connection], object] | None,
        on_told: Callable[[Told], None],
    ):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        leases, their_leases = context.Pipe() if setup.place else (None, None)
        process = context.Process(target=_main, args=(theirs, their_leases, setup), daemon=True)
        process.start()
        self._process, self._on_told = process, on_told
        theirs.close()
        if leases is not None and their_leases is not None and serve_leases is not None:
            their_leases.close()
            serve_leases(f"instance-{setup.number} of process {process.pid}", leases)
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def wait_ready(self) -> None:
        """Return when jobs may come. Raises EOFError if the process ended instead."""
        assert self._connection.recv() == _READY
        self._thread.start()

    def send(self, job: int, prompt: list[int], adapter: str, max_tokens: int) -> None:
        """Queue a job."""
        self._connection.send((job, prompt, adapter, max_tokens))

    def close(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join(60)
        self._process.kill()

    def _listen(self) -> None:
        try:
            while True:
                self._on_told(self._connection.recv())
        except (EOFError, OSError):
            pass


class _Answer:
    """Notes when the tokens of a job came."""

    def __init__(self, job: int, tell: Callable[[Told], None]):
        self._job, self._tell = job, tell
        self._first: float | None = None
        self._tokens = 0

    def __call__(self, delta) -> None:
        now = time.monotonic()
        if self._first is None and delta.token_ids:
            self._first = now
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            error = delta.error if delta.finish_reason is FinishReason.ERROR else None
            self._tell(Told(self._job, self._first, now, self._tokens, error))


def _main(connection: Connection, leases: Connection | None, setup: Setup) -> None:
    logging.basicConfig(level=logging.WARNING)
    use_gpu(setup.number)
    access = None
    if setup.place is not None and leases is not None:
        name = f"instance-{setup.number} of process {os.getpid()}"
        access = server_access(setup.place, Caller(leases), name)
    lock = threading.Lock()

    def tell(told: Told) -> None:
        with lock:
            connection.send(told)

    with Engine(setup.model, setup.adapters, lora_server=access, **setup.engine) as engine:
        connection.send(_READY)
        while (message := connection.recv()) is not None:
            job, prompt, adapter, max_tokens = message
            sampling = Sampling(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            engine.submit(prompt, adapter, sampling, on_output=_Answer(job, tell))
