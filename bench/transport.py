"""Round trips to a LoRA Server by transport and size: `python -m bench.transport --out DIR`.

The server is the loop of lora_server.transport.serve in another process (in_process: a thread) and
echoes the rows, so that what is timed is the transport, the loop's Python included. Microseconds,
[median, tenth percentile]: on a machine with other work the second says more. In one jit of 8
layers: the base alone, the round trip alone, one after the other, and the round trip behind the
base. TCP is over loopback; nixl needs its package.

At last several instances share one server over shared memory, which adds adapters of rank 64 to
their rows: microseconds per layer of the slowest instance, the server taking one request at a time
or, as it is shipped, receiving the next while one is computed.
"""

import argparse
import contextlib
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.shape import AdapterShape
from serving.lora_server.transport import in_process, shared_memory
from serving.lora_server.transport.base import AbstractClient, AbstractServer, PushRows
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.hosts import nixl, tcp
from serving.lora_server.transport.serve import serve
from serving.lora_server.transport.shapes import Shapes, Site

SECRET = b"of this one run only"
WIDTH = 256  # float32: a row is 1 KB
SIZES_KB = (1, 4, 16, 64, 256, 1024, 4096)
LAYERS = 8
RANK, SHARED_ROWS = 64, 64
TRANSPORTS = ("in_process", "shared_memory", "shared_memory_pull", "tcp", "nixl")


def terms() -> Terms:
    """One site whose results are as wide as its rows."""
    shapes = Shapes(LAYERS, max(SIZES_KB), "float32", "float32", (Site("echo", WIDTH, (WIDTH,)),))
    return Terms("bench", ServerLayout(AdapterShape(1, LAYERS, 1, 1)), shapes)


def echo(server: AbstractServer) -> None:
    """Answer every message with its own rows."""
    serve(server, lambda request: [request.x])


def echo_process(transport: str, path: str) -> None:
    """Serve until killed; over TCP say the port in a file."""
    if transport == "tcp":
        listening = tcp.listen("127.0.0.1", 0)
        Path(path + ".part").write_text(str(listening.getsockname()[1]))
        Path(path + ".part").rename(path)
        echo(tcp.open_server(listening, terms(), 0, SECRET))
    elif transport == "nixl":
        echo(nixl.open_server(path, terms(), 0))
    else:
        echo(shared_memory.open_server(path, terms(), 0, pull=transport.endswith("_pull")))


@contextlib.contextmanager
def connected(transport: str) -> Iterator[AbstractClient]:
    """Yield a client of an echoing server."""
    with contextlib.ExitStack() as stack:
        if transport == "in_process":
            server = in_process.open_server(terms().shapes)
            thread = threading.Thread(target=echo, args=(server,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.close)
            client = in_process.open_client([server])
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory()) + "/rank-0"
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=echo_process, args=(transport, path))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            client = other_process(transport, path)
        stack.callback(client.close)
        client.set_limit(10.0)
        yield client


def other_process(transport: str, path: str) -> AbstractClient:
    """Return a client of the server that says where it is at `path`."""
    if transport == "nixl":
        return nixl.open_client([path], terms(), patience=60.0)
    if transport != "tcp":
        pull = transport.endswith("_pull")
        return shared_memory.open_client([path], terms(), patience=60.0, pull=pull)
    while not Path(path).exists():
        time.sleep(0.01)
    return tcp.open_client([("127.0.0.1", int(Path(path).read_text()))], terms(), SECRET)


def rows_of(num_rows: int) -> PushRows:
    """Every row has an adapter of the one server."""
    ids = jnp.zeros(num_rows, jnp.int32)
    return PushRows(jnp.int32(num_rows), jnp.int32(0), ids, ids, ids)


def timed_us(call: Callable[[], object], repeats: int, share: int = 1) -> list[float]:
    """Return [median, tenth percentile] of a call, results ready, divided by `share`."""
    times = []
    for index in range(repeats + 3):
        start = time.perf_counter()
        jax.block_until_ready(call())
        if index >= 3:  # warm
            times.append((time.perf_counter() - start) * 1e6 / share)
    return [round(float(us), 1) for us in np.percentile(times, [50, 10])]


def steps(client: AbstractClient) -> dict[str, Callable]:
    """Return programs of 8 layers: base, comm, serial, overlap."""

    def base(x, up, down):
        return jnp.tanh(x @ up) @ down

    def exchange(x, y, layer, rows):
        (y,), _ = client.wait_add((y,), x, 0, rows)
        return y

    def repeat(layer_step):
        def step(x, up, down, rows):
            for layer in range(LAYERS):
                x = layer_step(x, up, down, layer, rows)
            return x

        return jax.jit(step)

    def comm(x, up, down, layer, rows):
        x = client.push(x, 0, layer, rows)
        return exchange(x, x * 0.5, layer, rows)

    def serial(x, up, down, layer, rows):
        return base(comm(x, up, down, layer, rows), up, down)

    def overlap(x, up, down, layer, rows):
        x = client.push(x, 0, layer, rows)
        return exchange(x, base(x, up, down), layer, rows)

    alone = repeat(lambda x, up, down, layer, rows: base(x, up, down))
    return {
        "base": alone,
        "comm": repeat(comm),
        "serial": repeat(serial),
        "overlap": repeat(overlap),
    }


def round_trips(client: AbstractClient, repeats: int) -> dict[str, list[float]]:
    """Return {size: us} of one push and wait_add in a jit of its own, its dispatch included."""

    @jax.jit
    def step(x, y, rows):
        x = client.push(x, 0, 0, rows)
        return client.wait_add((y,), x, 0, rows)[0]

    results = {}
    for size in SIZES_KB:
        x, rows = jnp.ones((size, WIDTH), jnp.float32), rows_of(size)
        results[f"{size} KB"] = timed_us(lambda x=x, rows=rows: step(x, x, rows), repeats)
    return results


def layers(client: AbstractClient, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return {size: {row: us per layer}} of the programs of `steps`."""
    results = {}
    rng = np.random.default_rng(0)
    up = jnp.asarray(rng.standard_normal((WIDTH, 4 * WIDTH)) / 16, jnp.float32)
    down = up.T
    for size in (16, 64, 256):
        x, rows = jnp.asarray(rng.standard_normal((size, WIDTH)), jnp.float32), rows_of(size)
        results[f"{size} KB"] = {
            name: timed_us(
                lambda step=step, x=x, rows=rows: step(x, up, down, rows), repeats, LAYERS
            )
            for name, step in steps(client).items()
        }
    return results


def lora_process(path: str, depth: int) -> None:
    """Serve rows times A times B until killed."""
    rng = np.random.default_rng(1)
    a = jnp.asarray(rng.standard_normal((WIDTH, RANK)) / 16, jnp.float32)
    b = jnp.asarray(rng.standard_normal((RANK, WIDTH)) / 8, jnp.float32)
    delta = jax.jit(lambda x: x @ a @ b)
    jax.block_until_ready(delta(jnp.zeros((SHARED_ROWS, WIDTH), jnp.float32)))
    server = shared_memory.open_server(path, terms(), 0)
    serve(server, lambda request: [delta(request.x)], depth=depth)


def instance_process(path: str, repeats: int, together, out) -> None:
    """Time `overlap` while the others do; put [median, tenth percentile] into `out`."""
    client = shared_memory.open_client([path], terms(), patience=60.0)
    client.set_limit(10.0)
    rng = np.random.default_rng(0)
    up = jnp.asarray(rng.standard_normal((WIDTH, 4 * WIDTH)) / 16, jnp.float32)
    x = jnp.asarray(rng.standard_normal((SHARED_ROWS, WIDTH)), jnp.float32)
    step, rows = steps(client)["overlap"], rows_of(SHARED_ROWS)
    jax.block_until_ready(step(x, up, up.T, rows))
    together.wait()
    out.put(timed_us(lambda: step(x, up, up.T, rows), repeats, LAYERS))
    together.wait()  # the others are still being timed
    client.close()


def shared(instances: int, depth: int, repeats: int) -> list[float]:
    """Return what the slowest of several instances takes per layer."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path, out = folder + "/rank-0", spawn.SimpleQueue()
        together = spawn.Barrier(instances)
        server = spawn.Process(target=lora_process, args=(path, depth), daemon=True)
        arguments = (path, repeats, together, out)
        clients = [
            spawn.Process(target=instance_process, args=arguments, daemon=True)
            for _ in range(instances)
        ]
        for process in (server, *clients):
            process.start()
        results = [out.get() for _ in clients]
        for client in clients:
            client.join()
        server.kill()
        server.join()
    return max(results)


def main() -> None:
    """Time every transport and write one JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS[:-1])
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    result = {
        **record.about(),
        "round_trip_us": {},
        "per_layer_us": {},
    }
    for transport in options.transports:
        with connected(transport) as client:
            result["round_trip_us"][transport] = round_trips(client, options.repeats)
            result["per_layer_us"][transport] = layers(client, max(options.repeats // 3, 1))
            failed = client.stats().timed_out + client.stats().aborted
        if failed:
            raise RuntimeError(f"{transport}: {failed} waits failed")
        print(transport, json.dumps(result["round_trip_us"][transport]))
        print(transport, json.dumps(result["per_layer_us"][transport]))
    result["per_layer_us_of_instances"] = {
        f"{count}, depth {depth}": shared(count, depth, max(options.repeats // 3, 1))
        for count in options.instances
        for depth in (1, 2)
    }
    print(json.dumps(result["per_layer_us_of_instances"]))
    record.write(options.out / "transport_cpu.json", result)


if __name__ == "__main__":
    main()
