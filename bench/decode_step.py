"""One decode step of a whole model, as the engine runs it, with and without LoRA.

`python -m bench.decode_step --out DIR` makes Qwen3-30B-A3B, or its first layers, of random weights
on the device and runs the runner's own programs many times, one behind the other. Every row decodes
at one position; adapters have one rank on every map, experts included. The program with LoRA is
timed without an adapter too: what a base row pays next to adapter rows.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slots import AdapterSlots, init_slots, size_slots
from lora_jax.config import ModelConfig
from lora_jax.models import make_dummy
from lora_jax.nn.decoder import AbstractCausalLM
from serving.model_runner import ModelRunner
from serving.step import NUM_TOKENS, SAMPLES, SLOT, START, TABLE_ROWS, StepSizes

STEPS, SAMPLES_TAKEN = 50, 3
ADAPTERS, RANK = 8, 16
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


def make_model(raw: dict[str, Any]) -> tuple[AbstractCausalLM, ModelConfig]:
    """Return a model of random weights from what a config.json would say."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(raw))
        return make_dummy(folder, dtype=jnp.bfloat16)


def filled_slots(catalogue: LoraCatalogue) -> AdapterSlots:
    """Return slots in which every adapter has rank rows of its own on every map."""
    slots = init_slots(catalogue, size_slots(catalogue, ADAPTERS, RANK, 2), jnp.dtype(jnp.bfloat16))
    entries = np.zeros(slots.entries.shape, np.int32)
    for i, name in enumerate(catalogue.module_names):
        experts = catalogue.modules[name].num_experts
        starts = np.arange(ADAPTERS) * RANK * max(experts, 1)
        entries[i, ..., 0] = entries[i, ..., 1] = starts
        entries[i, ..., 2] = RANK
        entries[i, ..., 3:] = RANK if experts else 0
    pools = {
        width: jax.random.normal(jax.random.key(int(width)), pool.shape, pool.dtype) * 0.02
        for width, pool in slots.pools.items()
    }
    scaling = jnp.full(slots.scaling.shape, 0.01, jnp.float32)
    return dataclasses.replace(slots, pools=pools, entries=jnp.asarray(entries), scaling=scaling)


def make_runner(raw: dict[str, Any], rows: int, position: int) -> ModelRunner:
    """Return a warm runner for steps of up to `rows` tokens."""
    pages = -(-(position + 1) // 16)
    sizes = StepSizes(rows, pages * 16, 16, rows * pages, max(rows, 64), RANK)
    model, config = make_model(raw)
    runner = ModelRunner(
        model,
        model.kv_shape(config),
        sizes,
        max_tokens=rows,
        vocab_size=config.vocab_size,
        dtype=jnp.dtype(jnp.bfloat16),
        slots=filled_slots(model.catalogue(config)),
        specialize_lora=True,
    )
    runner.warm_up(progress=True)
    return runner


def step_ms(runner: ModelRunner, rows: int, position: int, *, lora: bool, adapters: int) -> float:
    """Return the best mean milliseconds of many steps of greedy rows."""
    table = np.zeros((TABLE_ROWS, rows), np.int32)
    table[START], table[NUM_TOKENS], table[SAMPLES] = position, 1, 1
    table[SLOT] = np.arange(rows) % adapters if adapters else -1
    best, bucket = np.inf, next(b for b in runner.buckets if b >= rows)
    for _ in range(SAMPLES_TAKEN):
        start = time.perf_counter()
        for _ in range(STEPS):
            sampled, _ = runner._run(table, bucket, lora=lora, plain=True)
        jax.block_until_ready(sampled)
        best = min(best, (time.perf_counter() - start) * 1e3 / STEPS)
    return float(best)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.decode_step", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--position", type=int, default=512)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args()
    changed = {**QWEN3, **(TINY if args.tiny else {}), "num_hidden_layers": args.layers}
    raw = {**json.loads(SHOWN.read_text()), **changed}
    runner = make_runner(raw, args.rows, args.position)
    cases = {
        "base": {"lora": False, "adapters": 0},
        "base beside adapters": {"lora": True, "adapters": 0},
        f"{ADAPTERS} adapters": {"lora": True, "adapters": ADAPTERS},
    }
    measure = functools.partial(step_ms, runner, args.rows, args.position)
    found = {name: measure(**case) for name, case in cases.items()}
    for name, took in found.items():
        print(f"{name:22} {took:7.3f} ms a step, {args.rows / took * 1e3:7.0f} tokens/s")
    device = jax.devices()[0].device_kind
    result = {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "model": changed,
        "rows": args.rows,
        "position": args.position,
        "rank": RANK,
        "step_ms": found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"decode_step_{'_'.join(device.lower().split())}.json"
    (args.out / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
