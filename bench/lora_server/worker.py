"""A process for each GPU, told what to be: a rank of the server, or an instance."""

import contextlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.lora_server.plans import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    LORA,
    PLANS,
    RANK,
    SCALING,
    TOP_K,
    WIDTH,
)

LIMIT_S = 2.0  # for a wait: a hang ends, and is told by the statuses
CALLS, SAMPLES = 6, 9
_START_S, _CALL_S = 90.0, 60.0


class Worker:
    """One GPU's process, as the measuring side sees it."""

    def __init__(self, gpu: int, see_all: bool = False):
        """With `see_all` jax sees every GPU in every process, and each uses its own by default."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, gpu, see_all), daemon=True)
        self._process.start()
        theirs.close()
        self.gpu = gpu

    def start(self, name: str, *arguments) -> Callable:
        """Begin a call of the process's `_Gpu`; what comes back returns its result, or raises."""
        self._connection.send((name, arguments))
        return self._result

    def call(self, name: str, *arguments):
        """Return the result of a call. Raises RuntimeError in the process's words."""
        return self.start(name, *arguments)()

    def _result(self, limit_s: float = _CALL_S):
        if not self._connection.poll(limit_s):
            raise RuntimeError(f"GPU {self.gpu} says nothing for {limit_s} s")
        result, error = self._connection.recv()
        if error:
            raise RuntimeError(f"GPU {self.gpu}: {error}")
        return result

    def wait_ready(self) -> None:
        """Return when the process has its GPU."""
        self._result(_START_S)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def all_of(starts: Sequence[Callable]) -> list:
    """Return the results of calls that run at the same time."""
    return [result() for result in starts]


def _main(connection: Connection, gpu: int, see_all: bool) -> None:
    here = _Gpu(gpu, see_all)
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


class _Gpu:
    """What happens in the process; jax is imported here, when its GPU is chosen."""

    def __init__(self, gpu: int, see_all: bool):
        import jax

        from serving.role_gpu import use_gpu

        if see_all:
            jax.config.update("jax_default_device", jax.devices()[gpu])
        else:
            use_gpu(gpu)

        from bench.lora_server import programs
        from cuda_backend.peer import PeerDevice

        self._jax, self._programs = jax, programs
        self._ends = PeerDevice(gpu if see_all else 0)
        self._pools: dict = {}  # of a rank
        self._weights: dict = {}  # of an instance
        self._closing = contextlib.ExitStack()
        self._client: Any = None
        self.mode: Any = None

    def kind(self) -> str:
        """Return what the GPU is called."""
        return self._jax.local_devices()[0].device_kind

    # A rank of the server.

    def serve(self, plan_name: str, tokens: int, rank: int, path: str) -> None:
        """Open a server at `path` and answer from now on."""
        from serving.transport import device_memory

        plan, jnp = PLANS[plan_name], self._jax.numpy
        if not self._pools:
            self._pools = self._jax.block_until_ready(self._programs.make_pools())
        terms = plan.terms(tokens)
        server = device_memory.open_server(path, terms, rank, self._ends, pull=plan.pull)
        self._closing.callback(server.close)
        step, self.mode = self._programs.server_program(server), jnp.int32(LORA)
        ticket = self._jax.block_until_ready(step(jnp.zeros(8, jnp.int32), self._pools, self.mode))
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(step, ticket, stopping), daemon=True)
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(stopping.set)

    def hold_place(self, plan_name: str, tokens: int, rank: int, path: str) -> None:
        """Open a server that nothing is sent to, in the place of a rank without a GPU."""
        from serving.transport import device_memory

        terms = PLANS[plan_name].terms(tokens)
        server = device_memory.open_server(path, terms, rank, self._ends)
        self._closing.callback(server.close)

    def set_mode(self, mode: int) -> None:
        """Refuse, echo or compute, in programs that are enqueued from now on."""
        self.mode = self._jax.numpy.int32(mode)

    def _run(self, step: Callable, ticket, stopping: threading.Event) -> None:
        under_way = [ticket]
        while not stopping.is_set():
            under_way.append(step(under_way[-1], self._pools, self.mode))
            if len(under_way) > 3:
                under_way.pop(0).block_until_ready()
        self._jax.block_until_ready(under_way)

    # An instance.

    def connect(self, plan_name: str, tokens: int, paths: list[str], seed: int) -> None:
        """Join the servers."""
        from serving.transport import device_memory

        plan = self.plan = PLANS[plan_name]
        how = {"patience": 20.0, "pull": plan.pull, "aside": plan.aside}
        client = device_memory.open_client(paths, plan.terms(tokens), self._ends, **how)
        self._closing.callback(client.close)
        client.set_limit(LIMIT_S)
        self._client, self._tokens = client, tokens
        self._rows = self._programs.make_rows(plan, tokens, seed)

    def base(self, tokens: int) -> float:
        """Return microseconds of a layer of the base model alone."""
        self._tokens = tokens
        self._rows = self._programs.make_rows(PLANS["EP1-PP1"], tokens, 0)
        step = self._programs.program(self._programs.base_layer)
        return self._time(step, self._base_weights())[0]

    def exchange(self) -> tuple[float, int]:
        """Return microseconds of a layer's exchanges, and the worst status."""
        if not hasattr(self, "_exchange") or self._exchange[0] is not self._client:
            step = self._programs.program(self._programs.exchange_layer(self._client))
            self._exchange = (self._client, step)
        return self._time(self._exchange[1], {})

    def warm_overlap(self) -> None:
        """Compile `overlap`."""
        layer = self._programs.overlap_layer(self._client)
        self._overlap = self._programs.program(layer)
        self._jax.block_until_ready(self._overlap(self._state(), self._base_weights(), self._rows))

    def overlap(self) -> tuple[float, int]:
        """Return microseconds of a layer with its exchanges, and the worst status."""
        return self._time(self._overlap, self._base_weights())

    def waited(self) -> dict:
        """Return what the client counted."""
        stats = self._client.stats()
        return {"waits": stats.waits, "median_us": stats.wait_quantile(0.5) * 1e6}

    def error(self) -> float:
        """Return the largest relative error of some rows' gate deltas against float64."""
        rows, x = self._rows[0], self._state()[0]
        gate, status = self._programs.gate_deltas(self._client)(x, rows)
        if np.asarray(status).any():
            raise RuntimeError(f"status {np.asarray(status).tolist()} of one exchange")
        if not self._pools:
            self._pools = self._programs.make_pools()  # the servers' numbers, by the same seed
        sent = np.flatnonzero(np.asarray(rows.row_to_server) >= 0)
        some = sent[np.linspace(0, len(sent) - 1, 8).astype(int)]
        owners = np.asarray(rows.row_to_adapter)[some] * EXPERTS
        owners = owners + np.asarray(rows.row_to_expert)[some]
        places = (owners[:, None] * RANK + np.arange(RANK)).reshape(-1)
        pools = [np.asarray(pool[places], np.float64) for pool in self._pools["gate"]]
        a, b = (pool.reshape(8, RANK, -1) for pool in pools)
        h = np.einsum("td,trd->tr", np.asarray(x[some], np.float64), a)
        wanted = SCALING * np.einsum("tr,trd->td", h, b)
        wrong = np.linalg.norm(np.asarray(gate[some], np.float64) - wanted, axis=1)
        return float(np.max(wrong / np.linalg.norm(wanted, axis=1)))

    def leave(self) -> None:
        """Close whatever this GPU is."""
        self._closing.close()
        self._client = None

    def _base_weights(self) -> dict:
        if not self._weights:
            self._weights = self._jax.block_until_ready(self._programs.make_weights())
        return self._weights

    def _state(self) -> tuple:
        rows = self._tokens * TOP_K
        widths = (HIDDEN, WIDTH, WIDTH)
        found = self._programs.random(3, *(((rows, width), 1.0) for width in widths))
        return (*found, self._jax.numpy.int32(0))

    def _time(self, step: Callable, weights: dict) -> tuple[float, int]:
        """Return microseconds of one layer, the median of some samples, and the worst status."""
        state = self._state()
        for _ in range(2):
            state = step(state, weights, self._rows)
        self._jax.block_until_ready(state)
        samples = []
        for _ in range(SAMPLES):
            start = time.perf_counter()
            for _ in range(CALLS):
                state = step(state, weights, self._rows)
            self._jax.block_until_ready(state)
            samples.append((time.perf_counter() - start) * 1e6 / (CALLS * LAYERS))
        return statistics.median(samples), int(state[3])
