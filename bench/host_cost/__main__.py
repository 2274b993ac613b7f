"""Processor time that a server's host takes for a token, beside a device that takes none of it.

`python -m bench.host_cost --out DIR` serves the shipped model with a device in place of the real
one whose steps take `--step-ms` and draw any tokens, and asks `--callers` requests at once, each
again when it has been answered. Everything else is the server: plans, inputs of steps, detokenizer,
HTTP. A row has microseconds of processor time a token of the engine's thread, of the event loop and
of the process, and output tokens/s. The two threads share Python's lock, so a step lasts at least
about the rows' sum of both. Other programs on the machine raise the figures.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench import record
from serving import Engine
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.serve import front_server, run_server
from serving.engine.loop.pacing import SWITCH_S
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.runtime.garbage import rare_collections

MODEL = Path(__file__).parents[2] / "assets" / "tiny-moe"
_FIRST_TEXT, _LAST_SPECIAL = 300, 64  # ids below and above these are bytes and marks
_SCRIPTS = 64  # different steps' tokens
_STEP_TOKENS = 8  # at most, for each caller


class _Drawn:
    """Tokens of a step, there from a time on."""

    def __init__(self, ids: np.ndarray, ready_s: float):
        self._ids, self._ready_s = ids, ready_s

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        left_s = self._ready_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return self._ids


class ReadyDevice:
    """Runs steps one after the other, each in the same time, without a processor."""

    def __init__(self, engine: Engine, rows: int, step_s: float):
        """Takes the place of the engine's compiled step."""
        vocab, self._step_s = engine.model_info.vocab_size, step_s
        rng = np.random.default_rng(0)
        shape = _SCRIPTS, _STEP_TOKENS * rows
        self._ids = rng.integers(_FIRST_TEXT, vocab - _LAST_SPECIAL, shape).astype(np.int32)
        self._free_s, self.num_steps = 0.0, 0
        engine._loop._parts.runner._step.run = self.run

    def run(self, operands: Any, table: np.ndarray, bucket: int, **_: Any) -> tuple[Any, ...]:
        """Return what a compiled step does; nobody is to ask for log-probabilities."""
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s
        self.num_steps += 1
        drawn = _Drawn(self._ids[self.num_steps % _SCRIPTS], self._free_s)
        return operands.cache, operands.state, SimpleNamespace(token_ids=drawn, heads=None), None


class Measurement:
    """Callers and clocks of one server."""

    def __init__(self, args: argparse.Namespace, engine: Engine, port: int, device: ReadyDevice):
        self._args, self._port, self._device = args, port, device
        threads = engine._loop._thread, threading.main_thread()
        self._threads = [thread.ident for thread in threads if thread.ident is not None]
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measure, then end the server."""
        try:
            self._ask(1)
            for _ in range(self._args.repeats):
                before = self._clocks()
                tokens = self._ask(self._args.rounds)
                engine, loop, process, wall, steps = (
                    after - start for start, after in zip(before, self._clocks(), strict=True)
                )
                costs = {"engine_us": engine, "event_loop_us": loop, "process_us": process}
                row = {name: round(1e6 * s / tokens, 2) for name, s in costs.items()}
                row |= {"tokens_per_s": round(tokens / wall), "tokens": tokens, "steps": steps}
                print(row, flush=True)
                self.rows.append(row)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _clocks(self) -> list[float]:
        threads = map(time.pthread_getcpuclockid, self._threads)
        times = [time.clock_gettime(clock) for clock in threads]
        return [*times, time.process_time(), time.perf_counter(), self._device.num_steps]

    def _ask(self, rounds: int) -> int:
        args = self._args
        numbers = self._port, args.callers, rounds, args.tokens
        words = [sys.executable, "-m", "bench.host_cost.callers", *map(str, numbers), args.kind]
        words.append("whole" if args.whole else "stream")
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each repeat."""
    tokens = _STEP_TOKENS * args.callers
    sizes = {"max_num_seqs": args.callers, "max_num_batched_tokens": tokens}
    options = Options(EngineConfig(str(MODEL)), HttpSettings(), access_log=False)
    sys.setswitchinterval(SWITCH_S)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        engine = stack.enter_context(Engine(str(MODEL), **sizes))
        device = ReadyDevice(engine, args.callers, args.step_ms / 1e3)
        measurement = Measurement(args, engine, sock.getsockname()[1], device)
        thread = threading.Thread(target=measurement.run)
        server = front_server(create_app(engine, options.http), options, sock, thread.start)
        stack.enter_context(rare_collections())
        run_server(server, sock)
        thread.join()
    return measurement.rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--callers", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2, help="answers of a caller in a repeat")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--step-ms", type=float, default=13.0, help="time of a step (13)")
    parser.add_argument("--kind", choices=("completions", "chat"), default="completions")
    parser.add_argument("--whole", action="store_true", help="answers are not streamed")
    parser.add_argument("--repeats", type=int, default=3)
    args, about = parser.parse_args(), record.about()
    rows = measure(args)
    record.write(args.out / "host_cost_cpu.json", about | {"rows": rows})


if __name__ == "__main__":
    main()
