"""Exchanges between two GPUs by NVSHMEM and by mapped memory: `python -m bench.nvshmem --out DIR`.

A process for each GPU; the server's is a program per message, as a rank's, that answers with
multiples of the rows. What comes back is checked, bit for bit. Microseconds per exchange of eight
in one program, [median, tenth percentile], with no computation in between. At last the server is
killed while the client waits: the wait ends at once, and changes nothing. With `--one-gpu` both
processes take turns on one GPU: the bits and the end are shown, the times are not a network's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.transport import device_endpoints, device_memory, symmetric
from serving.lora_server.transport.base import AbstractClient, PushRows, Status
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.device_server import DeviceServer, Verdict, no_ticket
from serving.lora_server.transport.shapes import GATE_UP, Shapes, moe_shapes
from serving.lora_server.transport.socket_messages import unix_listener
from serving.runtime.gpu_assignment import use_gpu

LAYERS, HIDDEN, MOST_ROWS = 8, 4096, 512
ROWS = (8, 64, 128, 512)
TRANSPORTS = ("nvshmem", "mapped")
_SECONDS = 120.0
# Of processes that share a GPU: NVSHMEM leaves it behind a killed one, and then does not begin.
_ONE_GPU = Path("/dev/shm/mps_shm_0")


def terms() -> Terms:
    """Rows in bfloat16, results in float32, both of one width."""
    shapes = moe_shapes(LAYERS, MOST_ROWS, HIDDEN, HIDDEN, "bfloat16")
    return Terms("bench", ServerLayout(AdapterShape(1, LAYERS, 1, 1)), shapes)


def slot_bytes(shapes: Shapes) -> int:
    """Return the bytes of the larger slot."""
    return max(shapes.request_slot, shapes.response_slot)


def world(rank: int, folder: Path) -> symmetric.SymmetricEndpoints:
    """Return this process's GPU in a world of two."""
    from cuda_backend import nvshmem

    nvshmem.configure(one_host=True)
    path = folder / "world"
    if rank == 0:
        _ONE_GPU.unlink(missing_ok=True)
        path.with_suffix(".part").write_bytes(nvshmem.new_id())
        path.with_suffix(".part").rename(path)
    while not path.exists():
        time.sleep(0.01)
    return nvshmem.NvshmemDevice(0, rank, 2, path.read_bytes(), slot_bytes(terms().shapes))


def serve(folder: Path) -> None:
    """Answer both transports' messages, each on a thread, until killed."""
    endpoints = world(1, folder)
    servers = {
        "nvshmem": symmetric.open_server(unix_listener(folder / "nvshmem"), terms(), 0, endpoints),
        "mapped": device_memory.open_server(
            folder / "mapped", terms(), 0, device_endpoints.for_platform("gpu", 0)
        ),
    }
    for name, server in servers.items():
        (folder / f"{name}.ready").touch()
        answer_until(server, folder / f"{name}.done")
    time.sleep(_SECONDS)  # holds what comes now, and is killed


def answer_until(server: DeviceServer, done: Path) -> None:
    """Run a program per message until the client says that it is done."""

    @jax.jit
    def serve_one(ticket):
        messages, x = server.take(ticket, 20_000, GATE_UP)
        x = x.astype(jnp.float32)
        verdicts = jnp.full(len(ticket), Verdict.ANSWER, jnp.int32)
        return server.answer(messages, verdicts, [x * 2, x * -3], GATE_UP).info

    ticket = jnp.asarray(no_ticket())
    flying = []
    while not done.exists():
        ticket = serve_one(ticket)
        flying.append(ticket)
        if len(flying) > 3:
            flying.pop(0).block_until_ready()
    jax.block_until_ready(ticket)


def rows_of(count: int) -> PushRows:
    """Every row has an adapter of the one server."""
    ids = jnp.zeros(count, jnp.int32)
    return PushRows(jnp.int32(count), jnp.int32(0), ids, ids, ids)


def measure(client: AbstractClient) -> dict[str, Any]:
    """Return the times by number of rows; raises RuntimeError for wrong bits or a failed wait."""
    results: dict[str, Any] = {}
    client.set_limit(5.0)

    @jax.jit
    def step(x, ys, rows):
        statuses = []
        for layer in range(LAYERS):
            x = client.push(x, GATE_UP, layer, rows)
            ys, status = client.wait_add(ys, x, GATE_UP, rows)
            statuses.append(status)
        return ys, jnp.stack(statuses)

    rng = np.random.default_rng(0)
    for count in ROWS:
        x = jnp.asarray(rng.standard_normal((count, HIDDEN)), jnp.bfloat16)
        zeros = tuple(jnp.zeros((count, HIDDEN), jnp.float32) for _ in range(2))
        ys, status = step(x, zeros, rows_of(count))
        wide = np.asarray(x, np.float32)
        if np.asarray(status).any():
            raise RuntimeError(f"{count} rows: statuses {np.asarray(status).ravel().tolist()}")
        for y, factor in zip(ys, (2, -3), strict=True):
            want = np.zeros_like(wide)
            for _ in range(LAYERS):
                want = want + wide * np.float32(factor)
            if not np.array_equal(np.asarray(y), want):
                raise RuntimeError(f"{count} rows: wrong results")
        times, rows = [], rows_of(count)
        for _ in range(40):
            begun = time.perf_counter()
            jax.block_until_ready(step(x, zeros, rows))
            times.append((time.perf_counter() - begun) * 1e6 / LAYERS)
        results[str(count)] = [round(float(us), 1) for us in np.percentile(times, [50, 10])]
    return results


def killed(client: AbstractClient, server: subprocess.Popen) -> dict[str, Any]:
    """Kill the server while the client waits; return how the wait ended and after how long."""
    client.set_limit(10.0)
    x, rows = jnp.ones((8, HIDDEN), jnp.bfloat16), rows_of(8)
    ys = tuple(jnp.ones((8, HIDDEN), jnp.float32) for _ in range(2))

    @jax.jit
    def step(x, ys, rows):
        x = client.push(x, GATE_UP, 0, rows)
        return client.wait_add(ys, x, GATE_UP, rows)

    step.lower(x, ys, rows).compile()
    at: list[float] = []

    def kill() -> None:
        at.append(time.perf_counter())
        server.kill()

    timer = threading.Timer(0.5, kill)
    timer.start()
    got, status = jax.block_until_ready(step(x, ys, rows))
    took = time.perf_counter() - at[0]
    same = all(np.array_equal(y, np.ones_like(y)) for y in map(np.asarray, got))
    return {"status": Status(int(status[0])).name, "ms": round(took * 1e3, 1), "unchanged": same}


def main() -> None:
    """Be the client, with the server in another process; or be that."""
    parser = argparse.ArgumentParser(prog="python -m bench.nvshmem", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--one-gpu", action="store_true", help="both processes on GPU 0")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    use_gpu(0 if options.serve is None or options.one_gpu else 1)
    if options.serve is not None:
        serve(options.serve)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "bench.nvshmem", "--serve", name]
        command += ["--one-gpu"] if options.one_gpu else []
        server = subprocess.Popen(command)
        try:
            results = compare(folder, server)
        finally:
            server.kill()
    print(json.dumps(results))
    record.write(options.out / "nvshmem.json", results)
    sys.stdout.flush()
    os._exit(0)  # NVSHMEM's end is collective, and the other PE has gone


def compare(folder: Path, server: subprocess.Popen) -> dict[str, Any]:
    """Return what was measured of each transport."""
    endpoints = world(0, folder)
    results = record.about(record.jax_device()) | {"us_per_exchange": {}}
    for name in TRANSPORTS:
        while not (folder / f"{name}.ready").exists():
            if server.poll() is not None:
                raise RuntimeError("the server has ended")
            time.sleep(0.01)
        if name == "nvshmem":
            client = symmetric.open_client(
                [folder / name], terms(), endpoints, [1], patience=_SECONDS
            )
            kept = client
        else:
            client = device_memory.open_client(
                [folder / name],
                terms(),
                device_endpoints.for_platform("gpu", 0),
                separate_stream=False,
            )
        results["us_per_exchange"][name] = measure(client)
        print(name, json.dumps(results["us_per_exchange"][name]), flush=True)
        (folder / f"{name}.done").touch()
    results["killed"] = killed(kept, server)
    return results


if __name__ == "__main__":
    main()
