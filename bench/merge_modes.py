"""Merged weights on a CPU: no merging, merging always, and the policy of `--lora-merge auto`.

`python -m bench.merge_modes --out DIR` writes a Llama-shaped random model of 125 million parameters
(bench.random_model) with adapters of rank 64. One engine answers the same requests under each
policy, for several shares of the top adapter; the rest asks for five others and the base model.
`--primary` gives 90% of the requests to an engine of one merged adapter (`merge_adapter`) and the
rest to another engine. `--costs` prints what serving.scheduling.merge_policy.StepCosts says.

A figure is output tokens per second, of processor time and of the clock; other programs of the
machine change the first little. Prompts are 4 tokens and answers 24, greedy. In a turn every policy
answers the same requests; requests and order are drawn anew for each turn. Plain weights take part
twice: the difference of this equal pair is noise.
"""

import argparse
import collections
import dataclasses
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import record
from bench.random_model import LlamaShape, write_adapter, write_llama
from serving import Engine, Sampling
from serving.scheduling.merge_policy import PLAIN, MergePolicy, MergeTarget

TOP, OTHERS = "a0", ("a1", "a2", "a3", "a4", "a5")
SKEWS = (0.5, 0.7, 0.9, 0.95)
RANK, ROWS, ANSWER = 64, 16, 24
CHOOSING = 6000  # steps in which our policy has chosen; at a share of 0.7 it takes 1,900
SHORT = 2  # tokens of the answers before a turn, which bring the weights
RESAMPLES = 2000  # of the turns, for an interval


class Fixed:
    """A policy that always gives the same target."""

    def __init__(self, adapter: str):
        self._target = MergeTarget(adapter)

    def next(self, target: MergeTarget, rows: Any, can_merge: Any) -> MergeTarget:
        """Return the target."""
        return self._target


def write(root: Path) -> None:
    """Write model and adapters."""
    shape = LlamaShape()
    write_llama(root / "model", shape)
    for seed, name in enumerate((TOP, *OTHERS)):
        write_adapter(root / name, shape, RANK, seed + 1)


def engine_of(root: Path, **fields: Any) -> Engine:
    """Return an engine in bfloat16 with all adapters resident."""
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": ROWS, "max_loras": 6}
    sizes |= {"max_num_batched_tokens": 32, "max_lora_rank": RANK, "structured_outputs": False}
    adapters = {name: str(root / name) for name in (TOP, *OTHERS)}
    return Engine(
        str(root / "model"),
        adapters,
        dtype="bfloat16",
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        **(sizes | fields),
    )


def names_of(skew: float, count: int, seed: int = 0) -> list[str | None]:
    """Return the adapter of each request: the top adapter, one of the others, or the base model."""
    rng = random.Random(seed)
    return [TOP if rng.random() < skew else rng.choice([*OTHERS, None]) for _ in range(count)]


def chosen(policy: MergePolicy, skew: float, digests: Mapping[str, str]) -> MergeTarget:
    """Return what the policy has chosen after CHOOSING steps of ROWS requests of such names.

    A policy is a pure function of the rows of each step, so that none of them has to run.
    """
    target = MergeTarget()
    for step in range(CHOOSING):
        names = names_of(skew, ROWS, -1 - step)
        rows = collections.Counter(PLAIN if name is None else digests[name] for name in names)
        target = policy.next(target, rows, lambda digest: True)
    return target


class Seconds(NamedTuple):
    """Time of some requests: processor time of all threads, and the clock's."""

    processor: float
    clock: float


def timed(engine: Engine, names: Sequence[str | None], answer: int = ANSWER) -> Seconds:
    """Return the time in which the engine answers a request of each name."""
    prompts = [[3 + i % 1000, 5, 7, 11] for i in range(len(names))]
    sampling = Sampling(max_tokens=answer, temperature=0.0, ignore_eos=True, detokenize=False)
    busy, start = time.process_time(), time.perf_counter()
    engine.generate(prompts, list(names), sampling)
    return Seconds(time.process_time() - busy, time.perf_counter() - start)


def seconds(engine: Engine, names: Sequence[str | None]) -> float:
    """Return the processor time in which the engine answers a request of each name."""
    return timed(engine, names).processor


def median_rate(run: Callable[[], float], count: int, turns: int) -> float:
    """Return output tokens a second, the median of the turns."""
    return statistics.median(count * ANSWER / run() for _ in range(turns))


@dataclasses.dataclass
class Contestant:
    """A policy that takes turns with others: what it has chosen, and what its turns took."""

    policy: Any
    target: MergeTarget = dataclasses.field(default_factory=MergeTarget)
    turns: list[Seconds] = dataclasses.field(default_factory=list)
    steps: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def take_turn(self, engine: Engine, names: Sequence[str | None], *, counts: bool) -> None:
        """Answer a request of each name; short ones before bring the weights of this policy."""
        parts = engine._parts.loop._parts  # policies are no option of the engine
        modes, merged = parts.scheduler.modes, parts.runner.merged
        assert modes is not None
        assert merged is not None
        modes.policy = self.policy
        modes.reset(self.target)
        timed(engine, names[:ROWS], SHORT)
        before = dict(merged.steps)
        took = timed(engine, names)
        self.target = modes.target
        if counts:
            self.turns.append(took)
            self.steps.update({mode: n - before[mode] for mode, n in merged.steps.items()})


def modes(root: Path, requests: int, turns: int, skews: Sequence[float], seed: int) -> list[dict]:
    """Return a row for each skew: the rate under each policy, and how its steps ran."""
    rows, rng = [], random.Random(seed)
    with engine_of(root, lora_merge="auto") as engine:
        digests = {name: engine.registry.get(name).digest for name in (TOP, *OTHERS)}
        top, auto = digests[TOP], MergePolicy(mixture=True)
        for skew in skews:
            policies = {
                "unmerged": Contestant(Fixed(PLAIN)),
                "unmerged again": Contestant(Fixed(PLAIN)),
                "merged": Contestant(Fixed(top)),
                "auto": Contestant(auto, chosen(auto, skew, digests)),
            }
            for turn in range(turns + 1):
                names = names_of(skew, requests, turn)
                for policy in rng.sample(list(policies.values()), len(policies)):
                    policy.take_turn(engine, names, counts=turn > 0)
            rows.append({"skew": skew} | compared(policies, requests * ANSWER))
            print(rows[-1], flush=True)
    return rows


def compared(policies: Mapping[str, Contestant], tokens: int) -> dict[str, Any]:
    """Return tokens a second of processor time and of the clock, and ratios of rates turn by turn.

    `tokens` are those of a turn. `auto_over_better` compares ours with unmerged or merged, of which
    the better has the higher median; `equal_pair` compares plain weights with themselves.
    """
    load = round(os.getloadavg()[1], 1)  # of the last five minutes
    results: dict[str, Any] = {"turns": len(policies["auto"].turns), "load": load}
    for kind in Seconds._fields:
        rates = {
            name: [tokens / getattr(turn, kind) for turn in one.turns]
            for name, one in policies.items()
        }
        medians = {name: statistics.median(values) for name, values in rates.items()}
        better = max(("unmerged", "merged"), key=medians.__getitem__)
        results[kind] = {name: round(rate, 1) for name, rate in medians.items()} | {
            "better": better,
            "auto_over_better": ratio(rates["auto"], rates[better]),
            "equal_pair": ratio(rates["unmerged again"], rates["unmerged"]),
        }
    return results | {"steps": {name: dict(one.steps) for name, one in policies.items()}}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return the median of the ratios turn by turn, its 95% interval, the least and the most.

    The interval is that of the medians of turns drawn anew with repetition (a bootstrap).
    """
    ratios, rng = sorted(a / b for a, b in zip(ours, theirs, strict=True)), random.Random(0)
    drawn = (rng.choices(ratios, k=len(ratios)) for _ in range(RESAMPLES))
    medians = sorted(map(statistics.median, drawn))
    ends = medians[RESAMPLES // 40], medians[-1 - RESAMPLES // 40]
    return {
        "median": round(statistics.median(ratios), 3),
        "interval": [round(end, 3) for end in ends],
        "least": round(ratios[0], 3),
        "most": round(ratios[-1], 3),
    }


def primary(root: Path, requests: int, turns: int) -> list[dict]:
    """Return the rates of a 90/10 mix over two engines, of one engine, and of merged rows alone."""
    names = names_of(0.9, requests)
    rest = [name for name in names if name != TOP]
    hot = [TOP] * (len(names) - len(rest))
    with engine_of(root, merge_adapter=TOP) as merged, engine_of(root) as plain:
        ways = {
            "merged alone": lambda: seconds(merged, [TOP] * requests),
            "merged and another": lambda: seconds(merged, hot) + seconds(plain, rest),
            "one engine, unmerged": lambda: seconds(plain, names),
        }
        for run in ways.values():
            run()
        rates = {way: median_rate(run, requests, turns) for way, run in ways.items()}
    alone = rates["merged alone"]
    return [
        {"way": way, "tokens_per_s": round(rate, 1), "over_merged_alone": round(rate / alone, 3)}
        for way, rate in rates.items()
    ]


def costs(root: Path, turns: int) -> list[dict]:
    """Return milliseconds of processor time of a step, by what its rows ask for."""
    mixes: dict[str, list[str | None]] = {
        "2 of the base": [None] * 2,
        "16 of the base": [None] * 16,
        "16 of one adapter": [TOP] * 16,
        "16 of four adapters": [TOP, *OTHERS[:3]] * 4,
    }
    with engine_of(root) as engine:
        rows = []
        for mix, names in mixes.items():
            seconds(engine, names)
            results = min(seconds(engine, names) for _ in range(turns))
            rows.append({"rows": mix, "ms_per_token": round(1e3 * results / ANSWER, 1)})
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.merge_modes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--primary", action="store_true", help="measure a 90/10 mix over two engines"
    )
    kinds.add_argument("--costs", action="store_true", help="measure single steps")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--skews", type=float, nargs="+", default=SKEWS)
    parser.add_argument("--seed", type=int, default=0, help="draws the order of the policies")
    args = parser.parse_args()
    about = record.about()
    with tempfile.TemporaryDirectory() as tmp:
        write(Path(tmp))
        if args.primary:
            name, rows = "merged_primary", primary(Path(tmp), args.requests, args.turns)
        elif args.costs:
            name, rows = "merge_costs", costs(Path(tmp), args.turns)
        else:
            sizes = args.requests, args.turns, args.skews, args.seed
            name, rows = "merge_modes", modes(Path(tmp), *sizes)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.out is not None:
        record.write(args.out / f"{name}_cpu.json", about | {"rows": rows})


if __name__ == "__main__":
    main()
