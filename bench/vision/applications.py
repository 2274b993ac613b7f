"""V-LoRA's two applications on the shipped vision model, under four policies of merged weights.

Visual retrieval: prompts of about 256 tokens with an image, answers of 200; arrivals are Poisson,
16 adapters of rank 64, a share (skew) of the requests for the top one. Video analytics: each stream
sends a chunk a second, 6 images and a question, answers of 8 tokens; with heads one step each. The
sweeps are those of the paper's figures: rate and streams (14, 16), skew (19, 22), rows of other
adapters among 8 that arrive at once (20), two adapters (21), and requests at once (Table 3). The
paper's images have 256 tokens, tiny-vl's 16, and its arrivals are thinned from a trace that is not
here. Latency is from a request's time of arrival to its last token. Processor time changes little
with other programs of the machine.

| policy | weights |
| --- | --- |
| unmerged | plain always, as S-LoRA and Punica |
| merged | the top adapter is always merged, rows of others take it out again |
| dlora | merged or plain, never a mixture; a switch takes 53 / 5 of ours, the paper's figures |
| ours | `--lora-merge auto` |
"""

import concurrent.futures
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.merge_modes import Fixed
from bench.vision import shapes
from lora_jax.finetune.lora_params import LoraSpec, init_lora
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving import Engine, Sampling
from serving.scheduling.merge_policy import PLAIN, MergePolicy

NAMES = tuple(f"a{number}" for number in range(16))
HEAD = "head"
RANK, ROWS = 64, 8
POLICIES = ("unmerged", "merged", "dlora", "ours")
DLORA_SWITCH = 53 / 5  # milliseconds of dLoRA's switch over V-LoRA's
ANSWERS = {"retrieval": 200, "analytics": 8}
IMAGES = {"retrieval": 1, "analytics": 6}
QUESTION = "Which of these things is where, and which of them moves? "
PROMPT_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """A request: when it arrives, in seconds, its adapter, and the seed of its images."""

    at: float
    adapter: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Case:
    """A point of a sweep: what the swept size is, and the requests."""

    sweep: str
    value: float
    application: str
    jobs: list[Job]
    policies: tuple[str, ...] = POLICIES


def retrieval_jobs(count: int, rate: float, skew: float, names: Sequence[str] = NAMES) -> list[Job]:
    """Return requests with exponential times between them."""
    rng, at, jobs = random.Random(0), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        name = names[0] if rng.random() < skew else rng.choice(names[1:])
        jobs.append(Job(at, name, number))
    return jobs


def at_once(count: int, others: int) -> list[Job]:
    """Return requests that arrive together, `others` of them not for the top adapter."""
    names = NAMES[1 : 1 + others] + NAMES[:1] * (count - others)
    return [Job(0.0, name, number) for number, name in enumerate(names)]


def cases(
    count: int,
    seconds: int,
    rate: float,
    skew: float,
    rates: Sequence[float],
    streams: Sequence[int],
    skews: Sequence[float],
) -> list[Case]:
    """Return every point of every sweep; `rate` and `skew` hold where they are not swept."""
    found = [Case("rate", r, "retrieval", retrieval_jobs(count, r, skew)) for r in rates]
    found += [Case("streams", n, "analytics", analytics_jobs(n, seconds, skew)) for n in streams]
    found += [Case("skew", s, "retrieval", retrieval_jobs(count, rate, s)) for s in skews]
    two = retrieval_jobs(count, rate, skew, names=NAMES[:2])
    found.append(Case("two adapters", 2, "retrieval", two))
    fixed = ("unmerged", "merged")
    found += [Case("others", n, "retrieval", at_once(ROWS, n), fixed) for n in (1, 2, 3)]
    rest = round((1 - skew) * 2 * ROWS)
    return [*found, Case("at once", 2 * ROWS, "retrieval", at_once(2 * ROWS, rest))]


def analytics_jobs(streams: int, seconds: int, skew: float) -> list[Job]:
    """Return a chunk a second of each stream; a stream keeps its adapter."""
    top = round(skew * streams)
    adapters = [NAMES[0] if n < top else NAMES[1 + (n - top) % 15] for n in range(streams)]
    jobs = [
        Job(second + n / streams, adapters[n], 1000 + second * streams + n)
        for second in range(seconds)
        for n in range(streams)
    ]
    return sorted(jobs, key=lambda job: job.at)


def write_adapters(root: Path, model: Path) -> dict[str, str]:
    """Write the adapters, of no effect but of full cost, and one with a head; return folders."""
    config = read_config(model)
    catalogue = model_class(config.model_type).catalogue(config)
    modules = (*shapes.ATTENTION, "gate_proj", "up_proj", "down_proj")
    spec, dtype = LoraSpec(RANK, 2.0 * RANK, modules), np.dtype(jax.numpy.bfloat16)
    for seed, name in enumerate(NAMES):
        lora = init_lora(spec, catalogue, seed)
        save_adapter(root / name, lora, spec, catalogue, base_name=model.name, dtype=dtype)
    shapes.write_headed(root / HEAD, model, RANK, labels=5)
    return {name: str(root / name) for name in (*NAMES, HEAD)}


@contextmanager
def engine_of(model: Path, adapters: dict[str, str], mode: str) -> Iterator[Engine]:
    """Return an engine with every adapter resident."""
    with Engine(
        str(model),
        adapters,
        lora_merge=mode,
        max_model_len=512,
        max_num_seqs=ROWS,
        max_num_batched_tokens=256,
        max_loras=len(adapters),
        max_lora_rank=RANK,
        max_esft_adapters=0,
        structured_outputs=False,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
    ) as engine:
        yield engine


def set_policy(engine: Engine, policy: str) -> None:
    """Have the engine follow a policy from now on; policies are no option of the engine."""
    modes = engine._parts.loop._parts.scheduler.modes
    assert modes is not None
    top = engine.registry.get(NAMES[0]).digest
    modes.policy = {
        "unmerged": lambda: Fixed(PLAIN),
        "merged": lambda: Fixed(top),
        "dlora": lambda: MergePolicy(mixture=False),
        "ours": lambda: MergePolicy(mixture=True),
    }[policy]()
    modes.reset()


def slow_switches(merged: Any, factor: float) -> None:
    """Make each switch take `factor` times its own time."""
    plain = merged._follow

    def follow(*given: Any) -> None:
        before, start = merged.num_switches, time.perf_counter()
        plain(*given)
        if merged.num_switches > before:
            merged.wait()
            time.sleep((factor - 1) * (time.perf_counter() - start))

    merged._follow = follow


def prompt_of(engine: Engine, application: str) -> str:
    """Return an application's prompt: for retrieval of PROMPT_TOKENS tokens, images included."""
    images, one = IMAGES[application], len(engine.tokenizer.encode(QUESTION))
    tokens = PROMPT_TOKENS if application == "retrieval" else 0
    times = max(1, (tokens - images * 16) // one)
    return shapes.TURN.format(shapes.IMAGE * images, QUESTION * times)


def prompt_tokens(engine: Engine, application: str) -> int:
    """Return the tokens of an application's prompt without those of its images."""
    return len(engine.tokenizer.encode(prompt_of(engine, application))) - IMAGES[application]


def latencies(
    ask: Callable[[Job], Any], jobs: Sequence[Job], clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds from each job's arrival to the end of its answer."""
    start = clock()

    def run(job: Job) -> float:
        time.sleep(max(0.0, start + job.at - clock()))
        ask(job)
        return clock() - start - job.at

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


def asks(engine: Engine, application: str) -> dict[str, Callable[[Job], Any]]:
    """Return how a request of an application is asked: by the LM head, and by a task head."""
    images, length = IMAGES[application], ANSWERS[application]
    prompt = prompt_of(engine, application)
    sampling = Sampling(max_tokens=length, temperature=0.0, ignore_eos=True, detokenize=False)

    def pictures(job: Job) -> list[list[np.ndarray]]:
        return [[shapes.frame(100 * job.seed + n, (64, 64)) for n in range(images)]]

    return {
        "lm": lambda job: engine.generate([prompt], job.adapter, sampling, images=pictures(job)),
        "head": lambda job: engine.classify([prompt], HEAD, images=pictures(job)),
    }


def measure(engine: Engine, policy: str, case: Case, turns: int) -> Iterator[dict[str, Any]]:
    """Give a row for each way in which a policy answers: latency, and the same over tokens."""
    ways, length = asks(engine, case.application), ANSWERS[case.application]
    images = IMAGES[case.application]
    set_policy(engine, policy)
    chosen = ("lm", "head") if (case.application, policy) == ("analytics", "ours") else ("lm",)
    for way in chosen:
        latencies(ways[way], case.jobs[: len(case.jobs) // 3])  # until a policy has chosen
        spent, found = time.process_time(), []
        for _ in range(turns):
            found.append(latencies(ways[way], case.jobs))
        spent = (time.process_time() - spent) / (turns * len(case.jobs))
        seconds = statistics.median(statistics.mean(turn) for turn in found)
        last = min(max(j.at + s for j, s in zip(case.jobs, turn, strict=True)) for turn in found)
        tokens = 1 if way == "head" else length
        row: dict[str, Any] = {"sweep": case.sweep, "value": case.value}
        row |= {"application": case.application, "policy": policy, "answered_by": way}
        row |= {"latency_ms": round(1e3 * seconds, 1)}
        row |= {"ms_per_answer_token": round(1e3 * seconds / tokens, 2)}
        every = prompt_tokens(engine, case.application) + tokens + 256 * images
        row |= {"ms_per_token": round(1e3 * seconds / every, 3)}  # as V-LoRA's script divides
        row |= {"requests_per_s": round(len(case.jobs) / last, 2)}
        yield row | {"processor_ms_per_request": round(1e3 * spent, 1)}


def run(
    root: Path,
    *,
    model: Path = shapes.TINY,
    count: int = 12,
    seconds: int = 5,
    rate: float = 2.0,
    skew: float = 0.6,
    rates: Sequence[float] = (1.0, 2.0, 4.0),
    streams: Sequence[int] = (1, 2, 4),
    skews: Sequence[float] = (0.5, 0.7, 0.9),
    turns: int = 1,
) -> dict[str, Any]:
    """Return what every policy takes in every case; the policies take turns in each."""
    adapters = write_adapters(root, model)
    rows: list[dict[str, Any]] = []
    with engine_of(model, adapters, "auto") as auto, engine_of(model, adapters, "exact") as exact:
        slow_switches(exact._parts.loop._parts.runner.merged, DLORA_SWITCH)
        for case in cases(count, seconds, rate, skew, rates, streams, skews):
            for policy in case.policies:
                engine = exact if policy == "dlora" else auto
                for row in measure(engine, policy, case, turns):
                    rows.append(row)
                    print(row, flush=True)
    sizes = {"requests": count, "requests_per_s": rate, "skew": skew}
    return sizes | {"seconds": seconds, "turns": turns, "rows": rows}
