"""An LLM instance in a process of its own, without HTTP: jobs come in, times go out."""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax

from bench.ablation.prefilled import take_prompts_as_prefilled
from serving import Engine, FinishReason, Sampling
from serving.cluster.server_place import ServerPlace, server_access
from serving.lora_server.calls import Caller, serve_leases
from serving.lora_server.coordinator import Coordinator
from serving.lora_server.instance import ServerAccess
from serving.lora_server.transport.base import AbstractClient
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.selection import RankPlace
from serving.runtime.gpu_assignment import use_gpu

_ABORT = "abort"


@dataclasses.dataclass(frozen=True)
class Told:
    """Outcome of a job; times are those of time.monotonic, which all processes share."""

    job: int
    first: float | None
    last: float
    tokens: int
    error: str | None


@dataclasses.dataclass(frozen=True)
class Setup:
    """Start options of an instance."""

    number: int
    model: str
    adapters: dict[str, str]
    engine: dict[str, Any]  # fields of EngineConfig
    place: ServerPlace | None
    prefilled: bool = False  # prompts come with their KV pages


class Instance:
    """A running instance."""

    def __init__(self, setup: Setup):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._leases, their_leases = context.Pipe()
        process = context.Process(target=_main, args=(theirs, their_leases, setup), daemon=True)
        process.start()
        self._process, self.pid = process, process.pid or 0
        self._name = _name(setup, self.pid)
        self.device = ""  # its kind, when it is ready
        theirs.close()
        their_leases.close()

    def join(self, ranks: Sequence[RankPlace], coordinator: Coordinator) -> None:
        """Tell it where the ranks of its LoRA Server listen, for which its start waits."""
        serve_leases(coordinator, self._name, self._leases)
        self._connection.send(tuple(ranks))

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
            # One that was cut short has told how fast it was, if it had begun.
            cut = delta.finish_reason is FinishReason.ABORT and self._first is None
            bad = cut or delta.finish_reason is FinishReason.ERROR
            error = (delta.error or str(delta.finish_reason)) if bad else None
            self._tell(Told(self._job, self._first, now, self._tokens, error))


def _name(setup: Setup, pid: int) -> str:
    return f"instance-{setup.number} of process {pid}"


def _access(
    place: ServerPlace, setup: Setup, connection: Connection, leases: Connection
) -> ServerAccess:
    """Return the way to a server that starts meanwhile: it is waited for when it is needed."""

    def connect(terms: Terms, device: int) -> AbstractClient:
        there = dataclasses.replace(place, ranks=connection.recv())
        return server_access(there, caller, name).connect(terms, device)

    caller, name = Caller(leases), _name(setup, os.getpid())
    return dataclasses.replace(server_access(place, caller, name), connect=connect)


def _main(connection: Connection, leases: Connection, setup: Setup) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {setup.number} %(message)s")
    use_gpu(setup.number)
    access = None if setup.place is None else _access(setup.place, setup, connection, leases)
    lock = threading.Lock()

    def tell(told: Told) -> None:
        with lock:
            connection.send(told)

    with Engine(setup.model, setup.adapters, lora_server=access, **setup.engine) as engine:
        if setup.prefilled:
            take_prompts_as_prefilled(engine)
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
