"""Rate of many adapters over few slots, simulated with the engine's scheduler and loader.

`python -m bench.slot_rows --out DIR`: the requests of `bench.end_to_end` (192 at 64 at once, 512
tokens in and 128 out, adapters by Zipf 1.2 over 64) go through the scheduler, the adapter loader
and the allocator of slots; the device alone is made up. A step takes `--step-ms` and
`--prompt-token-us` for each prompt token, a load `--load-ms` beside the steps. It says how many
rows steps have, and so what `--max-loras` costs or gives before a GPU is asked. The defaults give
an H200's rate of Llama-3.1-8B's shape with 8 adapters.
"""

import argparse
import dataclasses
import json
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.end_to_end.points import ANSWER, PROMPT, by_popularity
from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_allocator import LoraPlacement, SlotAllocator
from lora_jax.adapters.slots import size_slots
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from serving.api.request import Request, Sequence, SequenceResult
from serving.api.sampling import Sampling
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.lora_residency import LoraResidency
from serving.scheduling.scheduler import Scheduler, SchedulerLimits

_CATALOGUE = LoraCatalogue("simulated", 1, {"q_proj": LoraModule("q_proj", 4, 4, (0,))}, ())
_IDLE_S = 0.0005  # of a turn of the loop without a step
_TOKEN = 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a run; times in seconds."""

    adapters: int = 64
    zipf: float = 1.2
    at_once: int = 64
    requests: int = 192
    step_s: float = 0.0107
    prompt_token_s: float = 30e-6
    load_s: float = 0.002


class _Load:
    """A load that begins behind the step that runs, and takes so long; see LoadJob."""

    def __init__(self, placement: LoraPlacement, device: "_Device"):
        self.digest, self._device = placement.digest, device
        self._begins, self._ends, self.done = device.steps + 1, float("inf"), False

    @property
    def remaining(self) -> int:
        return int(not self.done)

    def advance(self, state: None, max_chunks: int) -> None:
        del state, max_chunks
        if self._device.steps >= self._begins:
            self._ends = min(self._ends, self._device.now + self._device.case.load_s)
        self.done = self._device.now >= self._ends


class _Device:
    """The scheduler and loader of an engine, with a clock in the place of a device."""

    def __init__(self, case: Case, slots: int):
        self.case, self.now, self.steps = case, 0.0, 0
        adapters = [_adapter(number) for number in range(case.adapters)]
        allocator = SlotAllocator(_CATALOGUE, slots, size_slots(_CATALOGUE, slots, 1, 4).rows)
        self.loader = AdapterLoader(
            allocator, lambda p, _: _Load(p, self), at_once=8, clock=lambda: self.now
        )
        pages = case.at_once * (PROMPT + ANSWER) // 16 + case.at_once
        limits = SchedulerLimits(
            num_pages=pages,
            page_size=16,
            max_model_len=PROMPT + ANSWER,
            max_num_seqs=case.at_once,
            max_num_batched_tokens=8192,
            mixed_step_tokens=512,
            max_logit_rows=case.at_once,
            enable_prefix_caching=False,
        )
        self.scheduler = Scheduler(limits, adapters=LoraResidency(self.loader))
        self.entries = {entry.name: entry for entry in adapters}
        self.loader.follow(list(self.entries.items()))

    def ask(self, name: str, number: int) -> Sequence:
        """Queue a request."""
        entry = self.entries[name]
        sampling = Sampling(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)
        request = Request(
            request_id=str(number),
            prompt_ids=(_TOKEN,) * PROMPT,
            sampling=sampling,
            adapter=name,
            adapter_digest=entry.digest,
            on_output=lambda delta: None,
            arrival_s=self.now,
            deadline_s=self.now + 60.0,
        )
        self.loader.retain(entry)
        (sequence,) = self.scheduler.add(request)
        return sequence

    def step(self) -> tuple[int, list[Sequence], list[Sequence]]:
        """Return a step's rows, and the sequences with their first token and with their last."""
        plan = self.scheduler.plan(self.now)
        self.steps += 1
        self.loader.advance(None, 8)
        if plan is None:
            self.now += _IDLE_S
            return 0, [], []
        prompt = sum(chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1)
        self.now += self.case.step_s + self.case.prompt_token_s * prompt
        results = [SequenceResult(c, _TOKEN if c.samples else None) for c in plan.chunks]
        progress = self.scheduler.complete(plan, results, self.now)
        ended = [one.sequence for one in progress if one.finish_reason is not None]
        for sequence in ended:
            self.loader.drop(sequence.request.adapter_digest)
        begun = [one.sequence for one in progress if len(one.sequence.output_ids) == 1]
        return len(plan.chunks), begun, ended


def _adapter(number: int) -> AdapterEntry:
    name, matrix = f"a{number}", np.zeros((1, 1, 4), np.float32)
    of_files = name, f"digest {number}", {}, 32, 32, {}, 1, 2, None, None
    report = AdapterReport(AdapterKind.LORA, *of_files)
    weights = AdapterWeights({("q_proj", 0): SiteWeights(matrix, matrix.copy(), 1.0)}, report)
    return AdapterEntry(name, AdapterKind.LORA, report.digest, number, weights, False, name)


def simulate(case: Case, slots: int, seed: int) -> dict[str, float]:
    """Return output tokens/s, mean TTFT in ms, mean rows of a step, and loads."""
    device, rng = _Device(case, slots), random.Random(seed)
    names = by_popularity(tuple(device.entries), case.zipf)
    asked: dict[Sequence, float] = {}
    firsts: list[float] = []
    rows: list[int] = []
    num_ended = 0
    while num_ended < case.requests:
        while len(asked) < min(case.requests, case.at_once + num_ended):
            asked[device.ask(rng.choice(names), len(asked))] = device.now
        count, begun, ended = device.step()
        rows.append(count)
        firsts += [device.now - asked[sequence] for sequence in begun]
        num_ended += len(ended)
    return {
        "tokens_per_s": case.requests * ANSWER / device.now,
        "mean_ttft_ms": 1e3 * statistics.mean(firsts),
        "rows": statistics.mean(rows),
        "loads": device.loader.snapshot.swaps,
    }


def measure(case: Case, slots: list[int], seeds: int) -> dict[str, Any]:
    """Return the means over the seeds for each number of slots, and the rate over all resident."""
    results = {}
    for count in [*slots, case.adapters]:
        runs = [simulate(case, count, seed) for seed in range(seeds)]
        results[count] = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
    whole = results[case.adapters]["tokens_per_s"]
    for row in results.values():
        row["of_all_resident"] = row["tokens_per_s"] / whole
    return {**dataclasses.asdict(case), "seeds": seeds, "slots": results}


def main() -> None:
    """Simulate, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.slot_rows", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--slots", type=int, nargs="+", default=[12, 16, 20, 24, 32])
    parser.add_argument("--adapters", type=int, default=Case.adapters)
    parser.add_argument("--at-once", type=int, default=Case.at_once)
    parser.add_argument("--requests", type=int, default=Case.requests)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=1e3 * Case.step_s)
    parser.add_argument("--prompt-token-us", type=float, default=1e6 * Case.prompt_token_s)
    parser.add_argument("--load-ms", type=float, default=1e3 * Case.load_s)
    args = parser.parse_args()
    case = Case(
        adapters=args.adapters,
        at_once=args.at_once,
        requests=args.requests,
        step_s=args.step_ms / 1e3,
        prompt_token_s=args.prompt_token_us / 1e6,
        load_s=args.load_ms / 1e3,
    )
    result = record.about() | measure(case, args.slots, args.seeds)
    record.write(args.out / "slot_rows.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
