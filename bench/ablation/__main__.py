"""What each part of disaggregation brings (InfiniLoRA, Figure 14): `python -m bench.ablation`.

Five systems on the same number of devices, one after another, under the same requests. `coupled`:
every device an instance with its own adapters. `+disagg`: some are a LoRA Server, the base waits
for each answer, an adapter serves when all of it is loaded, and the server's kernels are plain JAX.
`+overlap`: exchanges behind the base's computation. `+loading`: a cold adapter serves from its
first layer on. `+kernel`: the fast kernels, which is the system as it is shipped. Each switch is a
flag of serving.launch too.

TTFT from arrival to the first token, TPOT the mean time of a request's later tokens.
"""

import argparse
import collections
import functools
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.ablation.instance import Instance, Setup, Told
from bench.ablation.workload import Job, Load, jobs, write_adapters
from serving.cluster.config import ClusterConfig
from serving.cluster.router import Router
from serving.cluster.server_place import ServerPlace, server_spec
from serving.config import EngineConfig
from serving.lora_server.calls import serve_leases
from serving.lora_server.group import ServerGroup

COUPLED = "coupled"
STEPS: dict[str, dict[str, Any]] = {
    "+disagg": {"lora_overlap": False, "layerwise_loading": False, "lora_kernel": "reference"},
    "+overlap": {"layerwise_loading": False, "lora_kernel": "reference"},
    "+loading": {"lora_kernel": "reference"},
    "+kernel": {},
}
_PATIENCE_S = 120.0  # for the last answer


def run(options: argparse.Namespace, name: str, adapters: dict[str, str]) -> dict[str, Any]:
    """Return one system's row."""
    engine = engine_fields(options, name)
    work = jobs(load_of(options), options.max_model_len)
    with ExitStack() as stack:
        told: list[Told] = []
        instances = start(options, name, adapters, engine, stack, told.append)
        warm_up(instances, list(adapters), told)
        router = Router(len(instances), adapters)
        begun = time.monotonic()
        for number, job in enumerate(work):
            time.sleep(max(0.0, begun + job.at - time.monotonic()))
            chosen = router.choose(job.adapter, len(job.prompt) + job.max_tokens)
            instances[chosen].send(number, job.prompt, job.adapter, job.max_tokens)
        wait_for(told, len(work))
        return {"name": name, "instances": len(instances)} | summary(
            options, work, begun, list(told)
        )


def engine_fields(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return what every instance of the system is started with."""
    return {
        "dtype": options.dtype,
        "load_format": options.load_format,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_loras": options.coupled_loras if name == COUPLED else options.max_loras,
        "max_lora_rank": options.max_lora_rank,
        "max_esft_adapters": 0,
        "enable_prefix_caching": False,
    }


def load_of(options: argparse.Namespace) -> Load:
    """Return the workload that the command line asks for."""
    lengths = options.prompt_tokens, options.output_tokens
    return Load(options.rate, options.seconds, options.adapters, options.zipf, *lengths)


def start(
    options: argparse.Namespace,
    name: str,
    adapters: dict[str, str],
    engine: dict[str, Any],
    stack: ExitStack,
    on_told: Callable[[Told], None],
) -> list[Instance]:
    """Return the instances of a system, ready; `stack` ends it."""
    number, place = options.instances + options.lora_server, None
    leases: Callable[[str, Connection], object] | None = None
    if name != COUPLED:
        number = options.instances
        cluster = ClusterConfig(
            instances=number,
            lora_server=options.lora_server,
            lora_server_adapters=options.server_loras,
            lora_server_wait_s=5.0,
            **STEPS[name],
        )
        spec = server_spec(EngineConfig(model=options.model, **engine), cluster)
        assert spec is not None, "a server was asked for"
        group = ServerGroup(spec, number)
        stack.callback(group.close)
        place = ServerPlace(group.spec, tuple(group.paths), cluster)
        leases = functools.partial(serve_leases, group.coordinator)

    setups = [Setup(n, options.model, adapters, engine, place) for n in range(number)]
    instances = [Instance(setup, leases, on_told) for setup in setups]
    for instance in instances:
        stack.callback(instance.close)
    for instance in instances:
        instance.wait_ready()
    return instances


def warm_up(instances: list[Instance], adapters: list[str], told: list[Told]) -> None:
    """Run a request of the least popular adapters, and forget it."""
    for number, instance in enumerate(instances):
        instance.send(-1, [5] * 8, adapters[-1 - number % len(adapters)], 8)
    wait_for(told, len(instances))
    told.clear()


def wait_for(told: list[Told], count: int) -> None:
    """Return when so many jobs have ended. Raises TimeoutError."""
    end = time.monotonic() + _PATIENCE_S
    while len(told) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"{count - len(told)} of {count} jobs have not ended")
        threading.Event().wait(0.01)


def summary(
    options: argparse.Namespace, work: list[Job], begun: float, told: list[Told]
) -> dict[str, Any]:
    """Return what Figure 14 shows, and what it rests on."""
    good = [one for one in told if one.error is None and one.first is not None]
    ttft = {t.job: t.first - begun - work[t.job].at for t in good if t.first is not None}
    tpot = {
        t.job: (t.last - t.first) / (t.tokens - 1)
        for t in good
        if t.tokens > 1 and t.first is not None
    }
    met: dict[str, list[bool]] = collections.defaultdict(list)
    for number, job in enumerate(work):
        well = ttft.get(number, np.inf) <= options.slo_ttft
        met[job.adapter].append(well and tpot.get(number, 0.0) <= options.slo_tpot)
    flat = [one for several in met.values() for one in several]
    return {
        "requests": len(work),
        "failed": len(work) - len(good),
        "ttft_p50": _quantile(ttft, 50),
        "ttft_p95": _quantile(ttft, 95),
        "tpot_mean": float(np.mean(list(tpot.values()))) if tpot else None,
        "slo_attainment": float(np.mean(flat)) if flat else None,
        "adapters_at_slo": float(np.mean([np.mean(one) >= 0.9 for one in met.values()])),
        "output_tokens_per_s": sum(t.tokens for t in good)
        / (max((t.last for t in good), default=begun + 1) - begun),
    }


def _quantile(values: dict[int, float], percent: float) -> float | None:
    return float(np.percentile(list(values.values()), percent)) if values else None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--model", default="assets/tiny-moe")
    parser.add_argument("--sources", type=Path, help="adapters to copy; by default the model's")
    parser.add_argument("--systems", nargs="+", default=[COUPLED, *STEPS])
    numbers: dict[str, int | float] = {
        "instances": 1,
        "lora_server": 1,
        "adapters": 24,
        "coupled_loras": 6,  # on each of instances + lora_server devices
        "max_loras": 24,  # attention parts on an instance
        "server_loras": 24,
        "max_lora_rank": 16,
        "rate": 10.0,
        "seconds": 20.0,
        "zipf": 1.2,
        "prompt_tokens": 24,
        "output_tokens": 24,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "slo_ttft": 0.25,
        "slo_tpot": 0.1,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    return parser.parse_args(argv)


def main() -> None:
    """Measure every system, write a JSON after each, and at last the plot."""
    options = parse_args()
    device = jax.devices()[0]
    kind = "cpu" if device.platform == "cpu" else device.device_kind.lower().replace(" ", "_")
    result: dict[str, Any] = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores" if kind == "cpu" else kind,
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "load_average_at_start": os.getloadavg()[0],
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"ablation_{kind}.json"
    with tempfile.TemporaryDirectory() as folder:
        sources = options.sources or Path(options.model, "adapters")
        adapters = write_adapters(sources, Path(folder), options.adapters)
        for name in options.systems:
            row = run(options, name, adapters)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            path.write_text(json.dumps(result, indent=2) + "\n")
    from bench.report import plot_ablation  # here: a machine that measures may have no matplotlib

    plot_ablation(result, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
