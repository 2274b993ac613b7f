"""An LLM instance in a process of its own, without HTTP: jobs come in, times go out."""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax

from serving import Engine, FinishReason, Sampling
from serving.cluster.server_place import ServerPlace, server_access
from serving.lora_server.calls import Caller
from serving.role_gpu import use_gpu

_ABORT = "abort"


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
    """A running instance."""

    def __init__(self, setup: Setup, serve_leases: Callable[[str, Connection], object] | None):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        leases, their_leases = context.Pipe() if setup.place else (None, None)
        process = context.Process(target=_main, args=(theirs, their_leases, setup), daemon=True)
        process.start()
        self._process, self.pid = process, process.pid or 0
        self.device = ""  # its kind, when it is ready
        theirs.close()
        if leases is not None and their_leases is not None and serve_leases is not None:
            their_leases.close()
            serve_leases(f"instance-{setup.number} of process {process.pid}", leases)

    def wait_ready(self, on_told: Callable[[Told], None]) -> None:
        """Return when jobs may come, of which `on_told` is told on a thread.

        Raises EOFError if the process ended instead.
        """
        self.device = self._connection.recv()
        threading.Thread(target=self._listen, args=(on_told,), daemon=True).start()

    def send(self, job: int, prompt: list[int], adapter: str, max_tokens: int) -> None:
        """Queue a job."""
        self._connection.send((job, prompt, adapter, max_tokens))

    def abort(self) -> None:
        """End the jobs that have not ended."""
        self._connection.send(_ABORT)

    def close(self) -> None:
        """End the process, which may have ended."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(60)
        self._process.kill()

    def _listen(self, on_told: Callable[[Told], None]) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                on_told(self._connection.recv())


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
            bad = delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            error = (delta.error or str(delta.finish_reason)) if bad else None
            self._tell(Told(self._job, self._first, now, self._tokens, error))


def _main(connection: Connection, leases: Connection | None, setup: Setup) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {setup.number} %(message)s")
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
        connection.send(jax.devices()[0].device_kind)
        asked: list[str] = []
        while (message := connection.recv()) is not None:
            if message == _ABORT:
                for request_id in asked:
                    engine.abort(request_id)
                continue
            job, prompt, adapter, max_tokens = message
            sampling = Sampling(
                max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            asked.append(engine.submit(prompt, adapter, sampling, on_output=_Answer(job, tell)))
