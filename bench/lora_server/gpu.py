"""Process of one GPU: a rank of the server, or an instance."""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.lora_server import programs
from bench.lora_server.plans import LORA, PLANS, SITES, Case, MeasuredPlan
from bench.lora_server.timeline import timeline
from serving.lora_server.device_loop import ONE_GRAPH
from serving.lora_server.transport import device_memory
from serving.lora_server.transport.device_client import DeviceClient
from serving.lora_server.transport.device_endpoints import DeviceEndpoints
from serving.lora_server.transport.device_server import no_ticket

LIMIT_S = 2.0  # for a wait: a hang ends, and is told by the statuses
FEW, CALLS, SAMPLES = 8, 25, 5  # calls of a program, and how often they are timed
_AHEAD = 2  # copies of a server's program: one is enqueued while the other one runs
_CHECKED = 8  # rows
_MODE_S = 30.0  # for a server's programs to end


class Gpu:
    """One GPU; one thread calls it. Everything is made on `device`."""

    def __init__(self, case: Case, endpoints: DeviceEndpoints, device: Any):
        self._case, self._endpoints, self._device = case, endpoints, device
        self._pools: dict = {}  # of a rank
        self._weights: dict = {}  # of an instance
        self._closing = contextlib.ExitStack()
        self._clients: list[DeviceClient] = []
        self._num_statuses = 1  # of a program
        self._orders: Any = None  # of the server's programs
        self._turns = 0  # programs that were enqueued

    def kind(self) -> str:
        """Return what the GPU is called."""
        return self._device.device_kind

    def set_case(self, case: Case) -> None:
        """Measure another case from now on."""
        if case != self._case:
            self._case, self._pools, self._weights = case, {}, {}

    # A rank of the server.

    def serve(self, plan_name: str, tokens: int, rank: int, path: str) -> None:
        """Open a server at `path` and answer from now on."""
        plan, case = PLANS[plan_name], self._case
        with self._here():
            if not self._pools:
                self._pools = self._put(programs.make_pools(case))
            terms = plan.terms(case, tokens)
            server = device_memory.open_server(path, terms, rank, self._endpoints, pull=plan.pull)
            self._closing.callback(server.close)
            options = ONE_GRAPH if plan.graph else programs.NO_GRAPH
            on_gpu = self._device.platform == "gpu"
            self._orders = self._put(programs.orders(LORA))
            steps = [
                programs.server_program(case, server, options if on_gpu else None)
                for _ in range(_AHEAD)
            ]
            tickets = [step(self._put(no_ticket()), self._pools, self._orders) for step in steps]
            jax.block_until_ready(tickets)
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(steps, tickets, stopping), daemon=True)
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(stopping.set)

    def hold_place(self, plan_name: str, tokens: int, rank: int, path: str) -> None:
        """Open a server that nothing is sent to, in the place of a rank without a GPU."""
        plan = PLANS[plan_name]
        terms = plan.terms(self._case, tokens)
        server = device_memory.open_server(path, terms, rank, self._endpoints, pull=plan.pull)
        self._closing.callback(server.close)

    def set_mode(self, mode: int) -> None:
        """Refuse, echo or compute, in every message from now on."""
        self._orders = self._put(programs.orders(mode))
        # One more may have been on its way to the queue with the last mode.
        enough, end = self._turns + _AHEAD + 1, time.monotonic() + _MODE_S
        while self._turns < enough:
            if time.monotonic() > end:
                raise RuntimeError(f"the server's programs have not ended in {_MODE_S} s")
            time.sleep(0.001)

    def _run(self, steps: list[Callable], tickets: list, stopping: threading.Event) -> None:
        """Enqueue the programs in turn, each when its last run has ended."""
        turn = 0
        with self._here():
            while not stopping.is_set():
                place, turn = turn % len(steps), turn + 1
                tickets[place].block_until_ready()
                tickets[place] = steps[place](tickets[place], self._pools, self._orders)
                self._turns += 1
            jax.block_until_ready(tickets)

    # An instance.

    def connect(self, plan_name: str, tokens: int, paths: list[str], seed: int) -> None:
        """Join the servers."""
        plan = PLANS[plan_name]
        with self._here():
            self._clients = [
                self._join(plan, tokens, paths, plan.separate_stream) for _ in range(plan.senders)
            ]
            # Alone there is nothing to push beside, and the whole program may be one graph.
            alone = [
                self._join(plan, tokens, paths, separate_stream=False) for _ in range(plan.senders)
            ]
            self._set_batch(plan, tokens, seed)
            servers = sum(client.servers for client in self._clients)
            self._num_statuses = len(self._rows) * len(SITES) * servers
            self._exchange = programs.program(programs.exchange_layer(alone))
            self._overlap = programs.program(programs.overlap_layer(self._clients))

    def _join(
        self, plan: MeasuredPlan, tokens: int, paths: list[str], separate_stream: bool
    ) -> DeviceClient:
        terms = plan.terms(self._case, tokens)
        how = {"pull": plan.pull, "separate_stream": separate_stream}
        client = device_memory.open_client(paths, terms, self._endpoints, patience=20.0, **how)
        self._closing.callback(client.close)
        client.set_limit(LIMIT_S)
        return client

    def base(self, tokens: int) -> float:
        """Return microseconds of a layer of the base model alone."""
        with self._here():
            self._set_batch(PLANS["EP1-PP1"], tokens, 0)
            return self._time(programs.program(programs.base_layer), self._base_weights())[0]

    def exchange(self) -> tuple[float, int]:
        """Return microseconds of a layer's exchanges, and the worst status."""
        with self._here():
            return self._time(self._exchange, {})

    def warm_overlap(self) -> None:
        """Compile `overlap`."""
        with self._here():
            jax.block_until_ready(self._overlap(self._state(), self._base_weights(), self._rows))

    def overlap(self) -> tuple[float, int]:
        """Return microseconds of a layer with its exchanges, and the worst status."""
        with self._here():
            return self._time(self._overlap, self._base_weights())

    def waited(self) -> dict:
        """Return what the first client counted."""
        stats = self._clients[0].stats()
        return {"waits": stats.waits, "median_us": stats.wait_quantile(0.5) * 1e6}

    def error(self) -> float:
        """Return the largest relative error of some rows' gate deltas against float64."""
        case, rows = self._case, self._rows[0][0]
        with self._here():
            x = self._state()[0]
            sent = np.flatnonzero(np.asarray(rows.row_to_server) >= 0)
            some = sent[np.linspace(0, len(sent) - 1, _CHECKED).astype(int)]
            wanted = self._wanted(np.asarray(x[some], np.float64), some)
            gate, status = programs.gate_deltas(case, self._clients[0])(x, rows)
            got = np.asarray(gate[some], np.float64)
        if np.asarray(status).any():
            raise RuntimeError(f"status {np.asarray(status).tolist()} of one exchange")
        wrong = np.linalg.norm(got - wanted, axis=1)
        return float(np.max(wrong / np.linalg.norm(wanted, axis=1)))

    def _wanted(self, x: np.ndarray, some: np.ndarray) -> np.ndarray:
        """Return the gate deltas of these rows, in float64."""
        case, rows = self._case, self._rows[0][0]
        owners = np.asarray(rows.row_to_adapter)[some] * case.experts
        owners = owners + np.asarray(rows.row_to_expert)[some]
        places = jnp.asarray((owners[:, None] * case.rank + np.arange(case.rank)).reshape(-1))
        a, b = (
            np.asarray(programs.numbers(rows=places, **programs.pool_of(case, width)), np.float64)
            for width in (case.hidden, case.width)
        )
        a, b = (rows.reshape(_CHECKED, case.rank, -1) for rows in (a, b))
        return programs.SCALING * np.einsum("tr,trd->td", np.einsum("td,trd->tr", x, a), b)

    def leave(self) -> None:
        """Close whatever this GPU is."""
        self._closing.close()
        self._clients.clear()

    # Both.

    def begin_trace(self, folder: str) -> None:
        """Record what runs on the GPU from now on."""
        jax.profiler.start_trace(folder)

    def end_trace(self, folder: str) -> list[tuple[str, float, float, str]]:
        """Return (stream, begin, microseconds, kernel) of what ran, in order."""
        jax.profiler.stop_trace()
        return timeline(folder)

    def _here(self):
        return jax.default_device(self._device)

    def _put(self, value: Any) -> Any:
        return jax.block_until_ready(jax.device_put(value, self._device))

    def _set_batch(self, plan: MeasuredPlan, tokens: int, seed: int) -> None:
        self._tokens = tokens
        each = [
            programs.make_rows(self._case, plan, tokens, (seed, sender))
            for sender in range(plan.senders)
        ]
        rows = {layer: [own[layer] for own in each] for layer in plan.layers(self._case)}
        self._rows = self._put(rows)  # of a layer: every sender's

    def _base_weights(self) -> dict:
        if not self._weights:
            self._weights = self._put(programs.make_weights(self._case))
        return self._weights

    def _state(self) -> tuple:
        case, rows = self._case, self._case.rows(self._tokens)
        widths = (case.hidden, case.width, case.width)
        return (
            *self._put([programs.matrix(3, rows, width, 1.0, case.dtype) for width in widths]),
            self._put(np.zeros(self._num_statuses, np.int32)),
        )

    def _time(self, step: Callable, weights: dict) -> tuple[float, int]:
        """Return microseconds of one layer, the median of some samples, and the worst status.

        A sample is what more calls take longer than few: whatever the host needs to begin is left
        out.
        """
        state, samples = self._state(), []

        def took(state: tuple, calls: int) -> tuple[tuple, float]:
            start = time.perf_counter()
            for _ in range(calls):
                state = step(state, weights, self._rows)
            jax.block_until_ready(state)
            return state, time.perf_counter() - start

        state, _ = took(state, 2)
        for _ in range(SAMPLES):
            state, few = took(state, FEW)
            state, many = took(state, FEW + CALLS)
            samples.append((many - few) * 1e6 / (CALLS * len(self._rows)))
        return statistics.median(samples), int(np.max(state[3]))
