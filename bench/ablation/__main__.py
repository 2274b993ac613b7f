"""Effect of each part of disaggregation (InfiniLoRA, Figure 14): `python -m bench.ablation`.

Five systems on the same number of devices, one after another, under the same requests. `coupled`:
every device an instance with its own adapters. `+disagg`: some are a LoRA Server, the base waits
for each answer, an adapter is asked for when its request could run, serves when all of it is
loaded, and the server's kernels are plain JAX. `+overlap`: exchanges behind the base's computation.
`+loading`: a cold adapter is asked for when a request is queued, and serves from its first layer
on. `+kernel`: the fast kernels, which is the system as it is shipped. Each switch is a flag of
serving.launch too. Others, by `--systems`, are the last one without one thing: `no layers`, `no
prefetch`, `neither`, and `aside`, whose rows leave in a stream of their own, on a GPU.

TTFT from arrival to the first token, TPOT the mean time of a request's later tokens, both also
within their limits for a share of the requests (`slo_attainment`), and for nine of ten requests of
a share of the adapters (`adapters_at_slo`). `serviceable_rate` is the highest of the rates at which
P95 TTFT and mean TPOT are within their limits. With `--prefilled` prompts come with their KV pages:
TTFT is then the time in the queue and of the first decode token, as in the paper, where prompts are
computed elsewhere. With `--cold` adapters that are on no device are asked for: one by one and again
(`cold_ttft`, `warm_ttft`), then, others, in a batch that fills all rows, when `queued_ttft` is over
that of a warm one (`queued_warm_ttft`), and beside one long answer, whose TPOT is `hit_tpot` alone
and `hit_tpot_beside_loads`.

A model may be a config.json alone (`--load-format dummy`), and so may its adapters (`--rank`).
With `--together` all systems start at once, and those that are not measured are stopped.
"""

import argparse
import collections
import contextlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.ablation.instance import Told
from bench.ablation.system import COUPLED, FIGURE_14, STEPS, Split, System, require_gpus
from bench.ablation.workload import (
    VOCAB,
    Job,
    Load,
    adapter_name,
    jobs,
    make_adapters,
    read_lengths,
    write_adapters,
)
from lora_jax.models.loader import read_config

_COLD_PROMPT, _COLD_TOKENS = 64, 4
_FULL_TOKENS, _QUEUED_AT = 16, 0.01  # of a batch that fills all rows; when the last one comes
_LONG_TOKENS = 96
_PATIENCE_S = 30.0  # for cold adapters


def rows_of(options: argparse.Namespace, system: System) -> Iterator[dict[str, Any]]:
    """Yield one row for each rate, what cold adapters cost, and the rate that is served well.

    Rates rise until one is not: the next would only be later.
    """
    if options.cold:
        yield {"name": system.name} | cold_row(options, system)
    best = 0.0
    for rate in sorted(options.rates):
        work = jobs(load_of(options, rate), options.max_model_len)
        begun, told = system.serve(work, options.patience)
        about = {"name": system.name, "device": system.device, "rate": rate}
        row = summary(options, work, begun, told)
        yield about | row
        if not is_served(options, row):
            break
        best = rate
    yield {"name": system.name, "serviceable_rate": best}


def is_served(options: argparse.Namespace, row: dict[str, Any]) -> bool:
    """Return whether P95 TTFT and mean TPOT are within the SLO, and no request failed."""
    ttft, tpot = row["ttft_p95"], row["tpot_mean"]
    well = not row["failed"] and ttft is not None and ttft <= options.slo_ttft
    return well and (tpot is None or tpot <= options.slo_tpot)


def cold_row(options: argparse.Namespace, system: System) -> dict[str, Any]:
    """Return medians of TTFT when adapters are asked for the first time, and what hits see of it.

    A third of the cold adapters for each: alone, queued behind full rows, beside a long answer.
    """
    rng, cold = np.random.default_rng(1), range(options.adapters, options.adapters + options.cold)

    def job(adapter: str, at: float = 0.0, tokens: int = _COLD_TOKENS) -> Job:
        prompt = rng.integers(4, VOCAB, _COLD_PROMPT).tolist()
        return Job(at, adapter, prompt, tokens)

    alone, queued, beside = ([adapter_name(n) for n in cold[part::3]] for part in range(3))
    results = {"cold_ttft": [], "warm_ttft": [], "queued_ttft": [], "queued_warm_ttft": []}
    for adapter in alone:
        for name in ("cold_ttft", "warm_ttft"):
            results[name].append(first_token_s(system, [job(adapter)]))
    for adapter in queued:
        hit = system.warm_neighbour(adapter)
        for name, last in (("queued_ttft", adapter), ("queued_warm_ttft", hit)):
            batch = [job(hit, tokens=_FULL_TOKENS) for _ in range(options.max_num_seqs)]
            results[name].append(first_token_s(system, [*batch, job(last, at=_QUEUED_AT)]))
    tokens = min(_LONG_TOKENS, options.max_model_len - _COLD_PROMPT)
    long = job(system.warm_neighbour(beside[0] if beside else adapter_name(0)), tokens=tokens)
    loads = [job(adapter, at=0.02 * place) for place, adapter in enumerate(beside)]
    return {name: float(np.median(times)) if times else None for name, times in results.items()} | {
        "hit_tpot": tpot_of_first(system, [long]),
        "hit_tpot_beside_loads": tpot_of_first(system, [long, *loads]),
    }


def first_token_s(system: System, work: list[Job]) -> float:
    """Return the seconds from the last job's arrival to its first token."""
    begun, told = system.serve(work, _PATIENCE_S)
    for one in told:
        if one.job == len(work) - 1 and one.first is not None:
            return one.first - begun - work[-1].at
    raise RuntimeError(f"{system.name} has not answered a job of {work[-1].adapter}: {told}")


def tpot_of_first(system: System, work: list[Job]) -> float:
    """Return the seconds of each later token of the first job."""
    _, told = system.serve(work, _PATIENCE_S)
    first = next(one for one in told if one.job == 0)
    if first.first is None or first.tokens < 2:
        raise RuntimeError(f"{system.name} has not answered a long job: {first}")
    return (first.last - first.first) / (first.tokens - 1)


def load_of(options: argparse.Namespace, rate: float) -> Load:
    """Return the workload that the command line asks for, at a rate."""
    lengths = read_lengths(options.lengths) if options.lengths else ()
    vocab = read_config(Path(options.model)).vocab_size if options.rank is not None else VOCAB
    medians = options.prompt_tokens, options.output_tokens
    return Load(
        rate,
        options.seconds,
        options.adapters,
        options.zipf,
        *medians,
        lengths=lengths,
        vocab=vocab,
    )


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
        "errors": sorted({one.error for one in told if one.error is not None})[:3],
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


def measure_all(options: argparse.Namespace, adapters: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of each system, which then ends."""
    if options.together:
        yield from _measure_together(options, adapters)
        return
    for name, split in systems_of(options):
        with contextlib.closing(System(options, name, split, adapters)) as system:
            yield from rows_of(options, system)


def systems_of(options: argparse.Namespace) -> list[tuple[str, Split]]:
    """Return each system with each split; the coupled one has none, and all devices."""
    first, *_ = options.splits
    named = ((name, [first] if name == COUPLED else options.splits) for name in options.systems)
    return [(name, split) for name, splits in named for split in splits]


def _measure_together(
    options: argparse.Namespace, adapters: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Start all at once, then let them go on one at a time."""

    def start(name: str, split: Split) -> System:
        system = System(options, name, split, adapters)
        system.pause()
        return system

    wanted = systems_of(options)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(wanted)) as pool:
        starting = {f"{name} {split}": pool.submit(start, name, split) for name, split in wanted}
        systems = []
        for name, future in starting.items():
            try:
                systems.append(stack.enter_context(contextlib.closing(future.result())))
            except (RuntimeError, ValueError, OSError, EOFError) as error:
                yield {"name": name, "failed": f"{type(error).__name__}: {error}"[:400]}
        while options.wait_for and not options.wait_for.exists():
            time.sleep(0.05)
        for system in systems:
            system.go_on()
            yield from rows_of(options, system)
            system.close()


# Flags that take a number, and their defaults.
_NUMBERS: dict[str, int | float] = {
    "adapters": 24,
    "cold": 0,  # more of them, asked before the others
    "warm": 0,  # the most popular ones, asked before
    "coupled_loras": 6,  # that a device holds beside the base
    "server_loras": 24,  # that a device holds alone; so many times the ranks are on the server
    "max_lora_rank": 16,
    "seconds": 20.0,
    "patience": 120.0,  # seconds until what is late is aborted
    "zipf": 1.2,
    "prompt_tokens": 24,
    "output_tokens": 24,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_gb": 0.0,  # 0: what the engine takes
    "slo_ttft": 0.25,
    "slo_tpot": 0.1,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ablation", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--model", default="assets/tiny-moe")
    parser.add_argument(
        "--sources", type=Path, help="folder of adapters to copy (default: the model's)"
    )
    parser.add_argument("--rank", type=int, help="rank of random adapters, instead of copies")
    parser.add_argument("--lengths", type=Path, help="Azure trace from which lengths are drawn")
    parser.add_argument(
        "--systems", nargs="+", default=[COUPLED, *FIGURE_14], choices=[COUPLED, *STEPS]
    )
    parser.add_argument(
        "--splits",
        type=Split.parse,
        nargs="+",
        default=[Split(1, 1)],
        help="devices as INSTANCES+RANKS or INSTANCES+RANKS:LAYOUT",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[10.0], help="requests per second"
    )
    parser.add_argument("--prefilled", action="store_true", help="prompts come with their KV pages")
    parser.add_argument("--together", action="store_true", help="start all systems at once")
    parser.add_argument(
        "--wait-for", type=Path, help="start all systems, measure once this file exists"
    )
    for name, default in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto")
    return parser.parse_args(argv)


def main() -> None:
    """Measure every system, write a JSON after each row, and at last the plot."""
    options = parse_args()
    try:
        require_gpus(options, os.environ)
    except ValueError as error:
        sys.exit(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or stopped processes would stay
    result: dict[str, Any] = {
        **record.about(),
        "options": {k: _said(v) for k, v in vars(options).items()},
        "rows": [],
    }
    path = options.out / "ablation.json"
    with tempfile.TemporaryDirectory() as folder:
        adapters = adapters_of(options, Path(folder))
        for row in measure_all(options, adapters):
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            record.write(path, result)
    if any("rate" in row for row in result["rows"]) and importlib.util.find_spec("matplotlib"):
        importlib.import_module("bench.report").plot_ablation(result, path.with_suffix(".png"))


def _said(value: Any) -> Any:
    """Return an option as JSON has it."""
    if isinstance(value, list):
        return [_said(one) for one in value]
    return str(value) if isinstance(value, Path | Split) else value


def adapters_of(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the folders of the adapters, written under `folder`."""
    count = options.adapters + options.cold
    if options.rank is not None:
        return make_adapters(folder, count, options.rank)
    return write_adapters(options.sources or Path(options.model, "adapters"), folder, count)


if __name__ == "__main__":
    main()
