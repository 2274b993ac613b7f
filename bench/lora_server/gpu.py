"""What happens on one GPU: it is a rank of the server, or an instance."""

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
from bench.lora_server.plans import LORA, PLANS, Case, Plan
from bench.lora_server.timeline import timeline
from serving.lora_server.device_loop import ONE_GRAPH
from serving.transport import device_memory
from serving.transport.device_ends import DeviceEnds

LIMIT_S = 2.0  # for a wait: a hang ends, and is told by the statuses
FEW, CALLS, SAMPLES = 8, 25, 5  # calls of a program, and how often they are timed
_AHEAD = 3  # programs of a server that are enqueued before the one that runs has ended
_CHECKED = 8  # rows


class Gpu:
    """One GPU; one thread calls it. Everything is made on `device`."""

    def __init__(self, case: Case, ends: DeviceEnds, device: jax.Device):
        self._case, self._ends, self._device = case, ends, device
        self._pools: dict = {}  # of a rank
        self._weights: dict = {}  # of an instance
        self._closing = contextlib.ExitStack()
        self._clients: list[Any] = []
        self.mode: Any = None

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
            server = device_memory.open_server(path, terms, rank, self._ends, pull=plan.pull)
            self._closing.callback(server.close)
            options = ONE_GRAPH if plan.graph else programs.NO_GRAPH
            on_gpu = self._device.platform == "gpu"
            step = programs.server_program(case, server, options if on_gpu else None)
            self.mode = self._put(np.int32(LORA))
            ticket = step(self._put(np.zeros(8, np.int32)), self._pools, self.mode)
            jax.block_until_ready(ticket)
        stopping, arguments = threading.Event(), (step, ticket)
        thread = threading.Thread(target=self._run, args=(*arguments, stopping), daemon=True)
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(stopping.set)

    def hold_place(self, plan_name: str, tokens: int, rank: int, path: str) -> None:
        """Open a server that nothing is sent to, in the place of a rank without a GPU."""
        plan = PLANS[plan_name]
        terms = plan.terms(self._case, tokens)
        server = device_memory.open_server(path, terms, rank, self._ends, pull=plan.pull)
        self._closing.callback(server.close)

    def set_mode(self, mode: int) -> None:
        """Refuse, echo or compute, in programs that are enqueued from now on."""
        self.mode = self._put(np.int32(mode))

    def _run(self, step: Callable, ticket, stopping: threading.Event) -> None:
        under_way = [ticket]
        with self._here():
            while not stopping.is_set():
                under_way.append(step(under_way[-1], self._pools, self.mode))
                if len(under_way) > _AHEAD:
                    under_way.pop(0).block_until_ready()
            jax.block_until_ready(under_way)

    # An instance.

    def connect(self, plan_name: str, tokens: int, paths: list[str], seed: int) -> None:
        """Join the servers."""
        plan = PLANS[plan_name]
        how = {"patience": 20.0, "pull": plan.pull, "aside": plan.aside}
        with self._here():
            for _ in range(plan.senders):
                terms = plan.terms(self._case, tokens)
                client = device_memory.open_client(paths, terms, self._ends, **how)
                self._closing.callback(client.close)
                client.set_limit(LIMIT_S)
                self._clients.append(client)
            self._set_batch(plan, tokens, seed)
            self._exchange = programs.program(programs.exchange_layer(self._clients))
            self._overlap = programs.program(programs.overlap_layer(self._clients))

    def base(self, tokens: int) -> float:
        """Return microseconds of a layer of the base model alone."""
        with self._here():
            self._set_batch(PLANS["EP1-PP1"], tokens, 0)
            return self._time(programs.program(programs.base_layer), [], self._base_weights())[0]

    def exchange(self) -> tuple[float, int]:
        """Return microseconds of a layer's exchanges, and the worst status."""
        with self._here():
            return self._time(self._exchange, [self._blank()[:2]], {})

    def warm_overlap(self) -> None:
        """Compile `overlap`."""
        with self._here():
            state = self._state(self._others())
            jax.block_until_ready(self._overlap(state, self._base_weights(), self._rows))

    def overlap(self) -> tuple[float, int]:
        """Return microseconds of a layer with its exchanges, and the worst status."""
        with self._here():
            return self._time(self._overlap, self._others(), self._base_weights())

    def waited(self) -> dict:
        """Return what the first client counted."""
        stats = self._clients[0].stats()
        return {"waits": stats.waits, "median_us": stats.wait_quantile(0.5) * 1e6}

    def error(self) -> float:
        """Return the largest relative error of some rows' gate deltas against float64."""
        case, rows = self._case, self._rows[0]
        with self._here():
            x = self._state([])[0]
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
        case, rows = self._case, self._rows[0]
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

    def _set_batch(self, plan: Plan, tokens: int, seed: int) -> None:
        self._tokens, self._senders = tokens, plan.senders
        self._rows = self._put(programs.make_rows(self._case, plan, tokens, seed))

    def _base_weights(self) -> dict:
        if not self._weights:
            self._weights = self._put(programs.make_weights(self._case))
        return self._weights

    def _blank(self) -> tuple:
        """Return a gate, an up and an x that a client's answers are added to."""
        case, rows = self._case, self._case.rows(self._tokens)
        widths = (case.width, case.width, case.hidden)
        return tuple(self._put(jnp.zeros((rows, width), case.dtype)) for width in widths)

    def _others(self) -> list:
        return [self._blank() for _ in range(self._senders - 1)]

    def _state(self, ys: list) -> tuple:
        case = self._case
        x = programs.matrix(3, case.rows(self._tokens), case.hidden, 1.0, case.dtype)
        return self._put(x), ys, self._put(np.int32(0))

    def _time(self, step: Callable, ys: list, weights: dict) -> tuple[float, int]:
        """Return microseconds of one layer, the median of some samples, and the worst status.

        A sample is what more calls take longer than few: whatever the host needs to begin is left
        out.
        """
        state, samples = self._state(ys), []

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
            samples.append((many - few) * 1e6 / (CALLS * self._case.layers))
        return statistics.median(samples), int(state[2])
