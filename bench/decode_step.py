"""One decode step of a whole model, as the engine runs it, with and without LoRA.

`python -m bench.decode_step --out DIR` makes Qwen3-30B-A3B, or its first layers, of random weights
on the device and lets the runner run one plan many times, reading a step when the next is on its
way. Every row decodes at one position, after a prompt of its own: equal tokens would all go to the
same experts. Adapters have one rank on every map, experts included; the program with LoRA is timed
with adapters that change nothing too: what a base row pays next to adapter rows. Batches take
turns; a figure is the median of a batch's turns. `--profile` says which kernels a step consists of.
`--devices 2` splits the model over two devices: the base's tokens are those of one device, and the
digest of them is in the results. `--quantization fp8` holds linear maps in that format.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from bench.quantised_model import FORMATS, quantised
from bench.step_profile import profile_step, show_profile
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slots import AdapterSlots, init_slots, size_slots
from lora_jax.config import ModelConfig, from_hf
from lora_jax.models import make_dummy
from lora_jax.models.split import make_split
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.sharding import Split
from serving.api.request import Request, ScheduledChunk, Sequence, StepPlan
from serving.api.sampling import Sampling
from serving.engine.parts.devices import local_widths, make_cpu_devices
from serving.steps.model_runner import ModelRunner
from serving.steps.runner_parts import ProgramChoice, StepAdapters, StepModel
from serving.steps.step import StepSizes

TURNS, STEPS, PAGE_SIZE = 7, 20, 16
ADAPTERS, RANK = 8, 16
EMPTY = ADAPTERS  # the slot of an adapter that changes nothing


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: slots that its rows take in turn, and how all of them are sampled."""

    name: str
    slots: tuple[int, ...]
    sampling: Sampling


GREEDY = Sampling(temperature=0.0)
CASES = (
    Case("base", (-1,), GREEDY),
    Case("base beside adapters", (*(-1,) * 7, EMPTY), GREEDY),
    Case(f"{ADAPTERS} adapters", tuple(range(ADAPTERS)), GREEDY),
    Case("base, drawn", (-1,), Sampling(temperature=0.8)),
    Case("base, top-k and top-p", (-1,), Sampling(temperature=0.8, top_k=50, top_p=0.95)),
    Case(
        "base, top-k, top-p and penalties",
        (-1,),
        Sampling(
            temperature=0.8, top_k=50, top_p=0.95, presence_penalty=1.0, repetition_penalty=1.1
        ),
    ),
)
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
TINY = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "vocab_size": 1024,
}
SHOWN = Path(__file__).parents[1] / "assets" / "tiny-moe" / "config.json"


def make_model(
    raw: dict[str, Any], split: Split | None = None, form: str | None = None
) -> tuple[AbstractCausalLM, ModelConfig]:
    """Return a model of random weights from what a config.json would say, quantised if wanted."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw))
        model, config = make_dummy(folder, dtype=jnp.bfloat16, split=split)
    return (quantised(model, form) if form else model), config


def linear_slots(
    model: AbstractCausalLM, config: ModelConfig, split: Split | None = None
) -> AdapterSlots:
    """Return filled slots of PEFT's usual adapters, which change no router, head or embedding.

    The model then knows so, as with `--lora-target-modules auto`.
    """
    catalogue = model.catalogue(config)
    kept = [name for name in catalogue.module_names if name.endswith("_proj")]
    catalogue = catalogue.only(kept)
    model.module_names = catalogue.module_names
    return filled_slots(catalogue, split)


def filled_slots(catalogue: LoraCatalogue, split: Split | None = None) -> AdapterSlots:
    """Return slots whose adapters have rank rows of their own at every site, and an empty slot."""
    widths = local_widths(split)
    catalogue = catalogue if widths is None else widths.catalogue(catalogue)
    sizes = size_slots(catalogue, ADAPTERS + 1, RANK, 2)
    slots = init_slots(catalogue, sizes, jnp.dtype(jnp.bfloat16), split)
    entries, used = np.zeros(slots.entries.shape, np.int32), dict.fromkeys(sizes.rows, 0)
    for i, name in enumerate(catalogue.module_names):
        module = catalogue.modules[name]
        rows = RANK * max(module.num_experts, 1)  # of an adapter
        for layer in module.layers:
            filled = entries[i, layer, :ADAPTERS]
            for column, width in enumerate((module.d_in, module.d_out)):
                filled[:, column] = used[width] + np.arange(ADAPTERS) * rows
                used[width] += ADAPTERS * rows
            filled[:, 2:] = RANK, *[RANK if module.num_experts else 0] * 2
    pools = {width: _noise(pool, jax.random.key(int(width))) for width, pool in slots.pools.items()}
    scaling = np.full(slots.scaling.shape, 0.01, np.float32)
    whole = slots.entries.sharding
    tables = (jax.device_put(table, whole) for table in (entries, scaling))
    return AdapterSlots(pools, *tables)


def _noise(like: jax.Array, key: jax.Array) -> jax.Array:
    """Return small random numbers where an array of their shape lies."""
    draw = functools.partial(jax.random.normal, shape=like.shape, dtype=like.dtype)
    return jax.jit(lambda key: draw(key) * 0.02, out_shardings=like.sharding)(key)


def make_runner(
    raw: dict[str, Any],
    rows: int,
    position: int,
    split: Split | None = None,
    form: str | None = None,
) -> ModelRunner:
    """Return a runner for steps of up to `rows` tokens, which compiles what it is asked for."""
    pages = -(-(position + 2) // PAGE_SIZE)
    sizes = StepSizes(rows, pages * PAGE_SIZE, PAGE_SIZE, rows * pages, max(rows, 64), RANK)
    model, config = make_model(raw, split, form)
    return ModelRunner(
        step_model(model, config, split),
        sizes,
        ProgramChoice(rows, base_only=True),
        StepAdapters(linear_slots(model, config, split)),
    )


def step_model(model: Any, config: Any, split: Split | None) -> StepModel:
    """Return a model in bfloat16, with its KV pages."""
    dtype = jnp.dtype(jnp.bfloat16)
    return StepModel(model, model.kv_shape(config), config.vocab_size, dtype, split=split)


def make_plan(case: Case, runner: ModelRunner, vocab: int, rows: int, position: int) -> StepPlan:
    """Return a decode step of `rows` sequences whose prompts are random."""
    rng, pages = np.random.default_rng(0), runner.sizes.max_pages
    chunks = []
    for row in range(rows):
        prompt = tuple(rng.integers(0, vocab, position + 1).tolist())
        request = Request(str(row), prompt, case.sampling, None, "", lambda delta: None, 0.0, 0.0)
        sequence = Sequence(request, index=0, seed=row, token_ids=list(prompt), row=row)
        sequence.slot = case.slots[row % len(case.slots)]
        sequence.pages = list(range(row * pages, (row + 1) * pages))
        chunks.append(ScheduledChunk(sequence, position, 1, samples=True))
    return StepPlan(tuple(chunks), tuple(chunk.sequence for chunk in chunks))


def start(runner: ModelRunner, plan: StepPlan) -> float:
    """Return the seconds of a plan's first step, which gives its rows to the runner."""
    begun = time.perf_counter()
    runner.read(runner.dispatch(plan))
    return time.perf_counter() - begun


def step_ms(runner: ModelRunner, plan: StepPlan, steps: int = STEPS) -> float:
    """Return the milliseconds from one step's results to the next's, while the next is on its way.

    The plan's rows are the runner's already.
    """
    again, ended = StepPlan(plan.chunks), []
    last = runner.dispatch(again)
    for _ in range(steps):
        last, before = runner.dispatch(again), last
        runner.read(before)
        ended.append(time.perf_counter())
    runner.read(last)
    return (time.perf_counter() - ended[0]) * 1e3 / steps


def take_turns(
    runner: ModelRunner, plans: dict[str, StepPlan], turns: int = TURNS, steps: int = STEPS
) -> dict[str, list[float]]:
    """Return the milliseconds of a step in every turn of every plan."""
    results = {name: [] for name in plans}
    for _ in range(turns):
        for name, plan in plans.items():
            start(runner, plan)
            results[name].append(step_ms(runner, plan, steps))
    return results


def sampled(runner: ModelRunner, plan: StepPlan) -> jax.Array:
    """Return the tokens of one more step."""
    return runner.dispatch(StepPlan(plan.chunks)).sampled.token_ids


def split_for(raw: dict[str, Any], devices: int, expert_parallel: bool | None) -> Split | None:
    """Return the split of a model over so many devices; None for one."""
    make_cpu_devices(devices)
    return make_split(from_hf(raw), devices, expert_parallel=expert_parallel)


def digest(tokens: jax.Array) -> str:
    """Return a short name of what a step has drawn."""
    return hashlib.sha256(np.asarray(tokens).tobytes()).hexdigest()[:16]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode_step", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--profile", action="store_true", help="show each step's kernels")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices that the model is split over"
    )
    parser.add_argument(
        "--expert-parallel",
        action=argparse.BooleanOptionalAction,
        help="give each device whole experts",
    )
    parser.add_argument(
        "--case", nargs="+", choices=[c.name for c in CASES], help="cases to run (default: all)"
    )
    parser.add_argument("--quantization", choices=FORMATS, help="format of the linear maps")
    args, about = parser.parse_args(), record.about()
    if args.quantization and args.devices > 1:
        parser.error("--quantization goes with one device")
    if not args.tiny:
        record.need_gpu("--tiny runs on a CPU.")
    changed = {**QWEN3, **(TINY if args.tiny else {}), "num_hidden_layers": args.layers}
    raw = {**json.loads(SHOWN.read_text()), **changed}
    split = split_for(raw, args.devices, args.expert_parallel)
    runner = make_runner(raw, args.rows, args.position, split, args.quantization)
    sizes = (raw["vocab_size"], args.rows, args.position)
    cases = [case for case in CASES if not args.case or case.name in ("base", *args.case)]
    plans = {case.name: make_plan(case, runner, *sizes) for case in cases}
    for name, plan in plans.items():
        print(f"{name:36} {start(runner, plan):.1f} s to its first result")
    turns = take_turns(runner, plans)
    for name, took in turns.items():
        median, rate = statistics.median(took), args.rows / statistics.median(took) * 1e3
        spread = f"{min(took):.3f} to {max(took):.3f}"
        print(f"{name:36} {median:7.3f} ms a step ({spread}), {rate:7.0f} tokens/s")
    for name, plan in plans.items() if args.profile else ():
        start(runner, plan)
        step = functools.partial(sampled, runner, plan)
        print(show_profile(name, profile_step(step)))
    start(runner, plans["base"])
    tokens = digest(sampled(runner, plans["base"]))
    print(f"tokens of the base: {tokens}")
    about["device"] = device = record.jax_device()
    result = {
        **about,
        "model": changed,
        "rows": args.rows,
        "position": args.position,
        "rank": RANK,
        "devices": args.devices,
        "quantization": args.quantization,
        "experts": None if split is None else split.experts,
        "base_tokens": tokens,
        "step_ms": {name: statistics.median(took) for name, took in turns.items()},
        "turns_ms": turns,
    }
    over = "" if split is None else f"_x{split.size}_{split.experts}"
    over += f"_{args.quantization}" if args.quantization else ""
    record.write(args.out / f"decode_step_{record.in_file_name(device)}{over}.json", result)


if __name__ == "__main__":
    main()
