"""Throughput of many adapters by Zipf, beside that of one: what moving between tiers costs.

`python -m bench.adapter_tiers --out DIR`: the shipped model on a CPU, hard links to a shipped
adapter, which differ in a config of their own and so in their digests, 30 on the device, 300 on the
host, the rest on the disk. A crowd of callers asks for 32 tokens, each again when it is answered.
Rounds of one adapter, of as many as lie on the device, and of all take turns; a ratio is the median
of those of a turn. With `--base-share` so many of the requests ask the base model, and the time
between two of their tokens is told.

`--lora-server` asks an engine beside a LoRA Server of one rank instead, over HTTP, and prints the
mean time to first tokens by the tier that adapters were in when they were asked for.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench import record
from bench.crowd import Crowd, tier_hits
from serving import Engine
from serving.engine.loop.pacing import SWITCH_S
from serving.runtime.garbage import rare_collections

MODEL = Path("assets/tiny-moe")
ADAPTER = MODEL / "adapters" / "intent"
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_queue": 4096}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a run."""

    adapters: int = 1000
    on_device: int = 30
    on_host: int = 300
    callers: int = 64  # who ask again when they are answered
    prompt: int = 8  # tokens
    answer: int = 32
    requests: int = 400
    rounds: int = 3
    zipf: float = 1.0
    base_share: float = 0.0


def write_adapters(folder: Path, count: int) -> list[str]:
    """Write hard links to the shipped adapter whose digests differ; return their names."""
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    (folder / "of_all").mkdir(parents=True)
    weights = shutil.copy(ADAPTER / "adapter_model.safetensors", folder / "of_all" / "weights")
    names = [f"a{number}" for number in range(count)]
    for name in names:
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps(config | {"revision": name}))
        os.link(weights, folder / name / "adapter_model.safetensors")
    return names


def measure(case: Case) -> dict[str, Any]:
    """Return tokens per second of one adapter, of those on the device and of all, with the
    processor's seconds of a round, and where requests found their adapters.
    """
    rng, turns = random.Random(1), []
    sys.setswitchinterval(SWITCH_S)  # as in a server
    with tempfile.TemporaryDirectory() as place:
        names = write_adapters(Path(place), case.adapters)
        populations = {"one": 1, "device": case.on_device, "all": case.adapters}
        tiers: dict[str, Any] = {"max_loras": case.on_device, "max_cpu_loras": case.on_host}
        tiers |= {"lora_dir": place, "max_adapter_loads_per_minute": 1_000_000}
        with Engine(MODEL, **SIZES, **tiers) as engine, rare_collections():  # as in a server
            crowds = {
                kind: Crowd(engine, names[:count], case, rng) for kind, count in populations.items()
            }
            crowds["all"].fill()
            for _ in range(case.rounds + 1):
                turns.append({kind: _round(engine, crowd) for kind, crowd in crowds.items()})
    counted = turns[1:]  # the first warms up
    kinds = ("tokens_per_s", "processor_s", *(("base_tpot_ms",) if case.base_share else ()))
    return {
        **dataclasses.asdict(case),
        **{what: {kind: _median(counted, kind, what) for kind in populations} for what in kinds},
        "ratios": {
            what: {kind: _ratio(counted, kind, what) for kind in populations} for what in kinds
        },
        "turns": counted,
    }


def _round(engine: Engine, crowd: Crowd) -> dict[str, Any]:
    """Return the figures of so many answers of a crowd that asks all the time."""
    crowd.begin()
    before, busy = tier_hits(engine), time.process_time()
    figures = crowd.round()
    figures["processor_s"] = time.process_time() - busy
    after = tier_hits(engine)
    crowd.end()
    return figures | {"hits": {tier: after[tier] - before[tier] for tier in after}}


def _median(turns: list[dict[str, dict[str, Any]]], kind: str, what: str) -> float:
    return statistics.median(turn[kind][what] for turn in turns)


def _ratio(turns: list[dict[str, dict[str, Any]]], kind: str, what: str) -> float:
    """Return the median of what a kind has over what one adapter has in the same turn."""
    return statistics.median(turn[kind][what] / turn["one"][what] for turn in turns)


def measure_beside_server(case: Case) -> dict:
    """Return hits and mean TTFT by tier, of an engine whose experts' parts are on a LoRA Server."""
    rng = random.Random(1)
    weights = [(rank + 1) ** -case.zipf for rank in range(case.adapters)]
    with tempfile.TemporaryDirectory() as place:
        names = write_adapters(Path(place), case.adapters)
        with served(place, case) as url, ThreadPoolExecutor(SIZES["max_num_seqs"]) as callers:
            ask = [(url, name) for name in rng.choices(names, weights, k=case.requests)]
            for _ in callers.map(_ask, ask):
                pass
            with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
                return {**dataclasses.asdict(case), "by_tier": _by_tier(answer.read().decode())}


@contextlib.contextmanager
def served(adapters: str, case: Case) -> Iterator[str]:
    """Yield the address of a server beside a LoRA Server of one rank, both on this CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "lora-server": 1,
        "lora-server-adapters": case.on_device,
        "max-loras": case.on_device,
        "max-cpu-loras": case.on_host,
        "max-num-seqs": SIZES["max_num_seqs"],
        "max-num-batched-tokens": SIZES["max_num_batched_tokens"],
        "max-adapter-loads-per-minute": 1_000_000,
        "lora-dir": adapters,
        "port": port,
    }
    given = (text for name, value in flags.items() for text in (f"--{name}", str(value)))
    command = [sys.executable, "-m", "serving.launch", str(MODEL), *given]
    process = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(3000):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=1):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError("the server is not healthy after 3,000 looks")
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _ask(asked: tuple[str, str]) -> None:
    url, name = asked
    body = {"model": name, "prompt": "a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def _by_tier(text: str) -> dict[str, dict[str, float]]:
    """Return requests and the mean seconds to their first token by tier, from /metrics."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name != "lora_jax:adapter_tier_ttft_seconds":
            continue
        for sample in family.samples:
            of_tier = found.setdefault(sample.labels["tier"], {"sum": 0.0, "count": 0.0})
            for name in of_tier:
                of_tier[name] += sample.value * sample.name.endswith(f"_{name}")
    return {
        tier: {"requests": of["count"], "mean_ttft_ms": 1e3 * of["sum"] / max(1.0, of["count"])}
        for tier, of in found.items()
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_tiers", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--adapters", type=int, default=Case.adapters)
    parser.add_argument("--requests", type=int, default=Case.requests)
    parser.add_argument("--rounds", type=int, default=Case.rounds)
    parser.add_argument("--base-share", type=float, default=0.0, help="requests for no adapter")
    parser.add_argument("--lora-server", action="store_true", help="beside a LoRA Server")
    given = parser.parse_args()
    measured = measure_beside_server if given.lora_server else measure
    told = record.about() | {"cores": len(os.sched_getaffinity(0))}
    sizes = {name: getattr(given, name) for name in ("adapters", "requests", "rounds")}
    case = Case(**sizes, base_share=given.base_share)
    results = told | measured(case)
    of_what = "lora_server" if given.lora_server else str(given.adapters)
    of_what += "_with_base" if given.base_share else ""
    record.write(given.out / f"adapter_tiers_{of_what}_cpu.json", results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
