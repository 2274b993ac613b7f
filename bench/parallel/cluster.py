"""Instances behind the router beside one instance on as many devices, under Poisson load.

`python -m bench.parallel cluster --devices 4 --out DIR` starts two servers of one model with 8
adapters: two instances of two devices behind the router, and one instance of four. Both run at
once, and take turns at each rate; requests are for the base or one of the adapters. The router is
no part of a server of one instance.
"""

import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.end_to_end.server import Server, write_adapter_configs
from bench.parallel import arrivals
from bench.parallel.arrivals import Load
from bench.parallel.quiet import Quiet
from bench.parallel.shapes import write_config

ADAPTERS, RANK, ROWS, BUDGET = 8, 16, 64, 512
RATES, SECONDS = (20.0, 40.0, 80.0), 5.0
PROMPT, ANSWER = 256, 64
TINY = {"rates": (4.0,), "seconds": 2.0, "prompt": 12, "answer": 6}


def measure(
    raw: dict[str, Any], devices: int, folder: Path, quiet: Quiet, logs: Path, *, tiny: bool = False
) -> dict[str, Any]:
    """Return a row for each system and rate; the servers' logs stay in `logs`.

    RuntimeError: a server did not start, or a request failed.
    """
    model = write_model(folder / "model", raw)
    modules = write_adapter_configs(folder / "adapters", ADAPTERS, RANK)
    systems = {f"TP {devices}": (1, devices), f"TP {devices // 2} x DP 2": (2, devices // 2)}
    case = TINY if tiny else {}
    rates, seconds = case.get("rates", RATES), case.get("seconds", SECONDS)
    lengths = {"prompt": case.get("prompt", PROMPT), "answer": case.get("answer", ANSWER)}
    names = ("base", *(module.partition("=")[0] for module in modules))
    logs.mkdir(parents=True, exist_ok=True)

    def start(system: str) -> Server:
        instances, size = systems[system]
        flags = flags_of(raw, instances, size, modules, **lengths)
        return Server(model, free_port(), flags, logs / f"{'_'.join(system.lower().split())}.log")

    rows = []
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(systems)) as pool:
            begun = {system: pool.submit(start, system) for system in systems}
            servers = {system: future.result() for system, future in begun.items()}
        for server in servers.values():
            stack.callback(server.stop)
        common = {"names": names, "vocab": raw["vocab_size"], **lengths}
        for system in servers:  # loads adapters
            port = _port(servers[system])
            for seed in range(2):
                arrivals.serve(port, Load(4 * len(names), 2.0, seed=seed, **common))
        with quiet.alone():
            for (turn, rate), system in itertools.product(enumerate(rates), servers):
                load = Load(rate, seconds, seed=2 + turn, **common)
                row = {"system": system} | arrivals.serve(_port(servers[system]), load)
                rows.append(row)
                print(row, flush=True)
                time.sleep(0.2)
    return {
        "devices": devices,
        "adapters": ADAPTERS,
        "rank": RANK,
        "rows": ROWS,
        "start_s": {system: round(server.start_s, 1) for system, server in servers.items()},
        "loads": rows,
    }


def flags_of(
    raw: dict[str, Any],
    instances: int,
    size: int,
    modules: tuple[str, ...],
    *,
    prompt: int,
    answer: int,
) -> list[str]:
    """Return the flags of a server; sequences wait for no KV page."""
    length = -(-(prompt + answer + 8) // 16) * 16
    per_token = 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"] * 2
    fields = {
        "load-format": "dummy",
        "dtype": "bfloat16",
        "tensor-parallel-size": size,
        "instances": instances,
        "max-num-seqs": ROWS,
        "max-num-batched-tokens": BUDGET,
        "max-model-len": length,
        "max-queue": 8192,
        "kv-cache-memory-bytes": (ROWS + 1) * length * per_token // size,
        "max-loras": ADAPTERS,
        "max-lora-rank": RANK,
        "max-esft-adapters": 0,
    }
    flags = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    flags += [
        "--no-structured-outputs",
        "--no-compile-base-only-steps",
        "--no-enable-prefix-caching",
    ]
    return [*flags, "--lora-modules", *modules]


def write_model(folder: Path, raw: dict[str, Any]) -> Path:
    """Write a config, and a tokenizer with a word for every token: each token is text at once."""
    write_config(folder, raw)
    words = {f"w{number}": number for number in range(raw["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _port(server: Server) -> int:
    return int(server.url.rpartition(":")[2])
