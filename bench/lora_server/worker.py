"""A process for each GPU, told what to be: a rank of the server, or an instance."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from bench.lora_server.plans import Case

_START_S, _CALL_S = 90.0, 40.0


class Worker(Protocol):
    """Worker of a GPU, one call at a time; `bench.lora_server.gpu.Gpu` has the calls."""

    def start(self, name: str, *arguments) -> Callable[[], Any]:
        """Begin a call; what comes back returns its result, or raises RuntimeError."""
        ...

    def call(self, name: str, *arguments) -> Any:
        """Return the result of a call. Raises RuntimeError in the GPU's words."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class ProcessWorker:
    """A Worker that is a process of its own."""

    def __init__(self, case: Case, gpu: int):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, case, gpu), daemon=True)
        self._process.start()
        theirs.close()
        self.gpu = gpu

    def start(self, name: str, *arguments) -> Callable:
        self._connection.send((name, arguments))
        return self._result

    def call(self, name: str, *arguments):
        return self.start(name, *arguments)()

    def wait_ready(self) -> None:
        """Return when the process has its GPU."""
        self._result(_START_S)

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _result(self, limit_s: float = _CALL_S):
        if not self._connection.poll(limit_s):
            raise RuntimeError(f"GPU {self.gpu} says nothing for {limit_s} s")
        result, error = self._connection.recv()
        if error:
            raise RuntimeError(f"GPU {self.gpu}: {error}")
        return result


def all_of(starts: Sequence[Callable]) -> list:
    """Return the results of calls that run at the same time, when all have ended."""
    results, errors = [], []
    for result in starts:
        try:
            results.append(result())
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _main(connection: Connection, case: Case, gpu: int) -> None:
    """Be one GPU; jax is imported here, when the GPU is chosen."""
    from serving.runtime.gpu_assignment import use_gpu

    use_gpu(gpu)

    import jax

    from bench.lora_server.gpu import Gpu
    from cuda_backend.peer import PeerDevice

    here = Gpu(case, PeerDevice(0), jax.devices("cuda")[0])
    connection.send((None, ""))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(here, name)(*arguments), ""))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"[:400]))
