"""Trains the base of assets/tiny-vl, a Qwen3-VL of 5 million parameters, on scenes of emoji.

    python -m lora_jax.finetune.pictures.make_base --data DATA --out assets/tiny-vl

DATA is what `collect` wrote. The base learns names and kinds of emoji, lists of the things in a
scene with their places, and whether a kind is there; never clothes, digits or flags, and no emoji
that is held out.
"""

import argparse
import json
import multiprocessing
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.config import from_hf
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.forward import forward
from lora_jax.finetune.pictures import checkpoint, tasks
from lora_jax.finetune.pictures.rows import (
    PictureBatch,
    PictureRows,
    image_rows_of,
    joined,
    picture_rows,
)
from lora_jax.finetune.training import Schedule, fit, mean_loss
from lora_jax.models import build
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float
from lora_jax.vision.processor import ProcessorSettings, read_settings

VOCAB = 2048
LENGTH = 60  # tokens of the longest example, 16 of its image
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_heads": 2,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "out_hidden_size": 256,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [1, 2],
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": TEXT,
    "vision_config": VISION,
    "vision_start_token_id": VOCAB - 3,
    "vision_end_token_id": VOCAB - 2,
    "image_token_id": VOCAB - 1,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 4096,
    "max_pixels": 4096,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def write_text_files(sources: tasks.Sources, folder: pathlib.Path) -> None:
    """Write tokenizer and image processor; the tokenizer learns names, kinds, places, prompts."""
    names = [str(name) for source in sources.values() for name in source.names]
    examples = [e for task in tasks.TASKS for e in tasks.draw(task, sources, 200, 0)]
    texts = sorted({*names, *(n.replace(" ", "") for n in names)})
    texts += [f"{e.prompt}\n{e.answer}" for e in examples]
    checkpoint.save_tokenizer(texts, VOCAB, folder, TEXT["max_position_embeddings"])
    text = json.dumps(PROCESSOR, indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")


def drawn(given: tuple[tasks.Sources, pathlib.Path, int, int]) -> PictureRows:
    """Return rows of every task of the base: (sources, model folder, how many of each, seed)."""
    sources, folder, count, seed = given
    config = from_hf(CONFIG)
    form, settings = read_format(folder), read_settings(folder, config.tower)
    examples = [e for task in tasks.BASE_TASKS for e in tasks.draw(task, sources, count, seed)]
    return picture_rows(examples, form, config, settings, length=LENGTH)


def base_rows(
    sources: tasks.Sources, folder: pathlib.Path, count: int, processes: int
) -> PictureRows:
    """Return `count` examples of each task of the base as rows, drawn by several processes."""
    each = -(-count // processes)
    work = [(sources, folder, each, seed) for seed in range(processes)]
    if processes == 1:
        return drawn(work[0])
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return joined(pool.map(drawn, work))


def train_base(
    rows: PictureRows, settings: ProcessorSettings, schedule: Schedule
) -> AbstractCausalLM:
    """Return a model trained on the answers of the rows, in float32."""
    model = build(from_hf(CONFIG), jnp.float32, nnx.Rngs(schedule.seed))
    graphdef, state = nnx.split(model, graph=False)
    values = jnp.asarray(settings.values)

    def loss(state: Any, _: None, batch: PictureBatch) -> Float[Array, ""]:
        merged = nnx.merge(graphdef, state)
        logits = picture_logits(merged, batch, values, rows.grid, None)
        return mean_loss(logits, batch.targets, batch.weights)

    return nnx.merge(graphdef, fit(state, None, loss, rows, schedule, label="base"))


def picture_logits(
    model: AbstractCausalLM,
    batch: PictureBatch,
    values: Float[Array, "3 256"],
    grid: tuple[int, int],
    lora: Any,
) -> Float[Array, "rows length vocab"]:
    """Return the logits of every place of a batch with images."""
    images = image_rows_of(model, batch, values, grid, lora)
    segments = jnp.zeros_like(batch.tokens)
    return forward(model, batch.tokens, segments, segments, lora, images).logits


def right_answers(
    model: AbstractCausalLM,
    rows: PictureRows,
    settings: ProcessorSettings,
    lora: Any = None,
    batch: int = 64,
) -> np.ndarray:
    """Return, bool [rows], whether greedy decoding gives every token of the answer."""
    graphdef, state = nnx.split(model, graph=False)
    values = jnp.asarray(settings.values)

    @jax.jit
    def right(state: Any, lora: Any, batch: PictureBatch) -> Array:
        logits = picture_logits(nnx.merge(graphdef, state), batch, values, rows.grid, lora)
        wrong = (jnp.argmax(logits, axis=-1) != batch.targets) & (batch.weights > 0)
        return ~jnp.any(wrong, axis=1)

    starts = range(0, rows.num_rows, batch)
    places = [np.arange(start, start + batch) % rows.num_rows for start in starts]
    is_right = np.concatenate([np.asarray(right(state, lora, rows.take(at))) for at in places])
    return is_right[: rows.num_rows]


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.pictures.make_base")
    add = parser.add_argument
    add("--data", type=pathlib.Path, required=True)
    add("--out", type=pathlib.Path, required=True)
    add("--examples", type=int, default=60000, help="examples of each task")
    add("--steps", type=int, default=6000)
    add("--batch-rows", type=int, default=512)
    add("--learning-rate", type=float, default=1.5e-3)
    add("--processes", type=int, default=1, help="processes that draw scenes")
    args = parser.parse_args(argv)
    parts = tasks.parts(tasks.read_sources(args.data))
    write_text_files(parts[False], args.out)
    settings = read_settings(args.out, from_hf(CONFIG).tower)
    start = time.monotonic()
    rows = base_rows(parts[False], args.out, args.examples, args.processes)
    print(f"{rows.num_rows} images drawn in {time.monotonic() - start:.0f} s", flush=True)
    warmup = min(200, args.steps // 10)
    schedule = Schedule(args.steps, args.batch_rows, args.learning_rate, warmup, weight_decay=0.05)
    start = time.monotonic()
    model = train_base(rows, settings, schedule)
    print(f"{args.steps} steps in {time.monotonic() - start:.0f} s", flush=True)
    checkpoint.save_model(model, CONFIG, args.out)
    form = read_format(args.out)
    for task in tasks.BASE_TASKS:
        seen = task == "name"  # of a name that nobody told it, nothing can be asked
        examples = tasks.draw(task, parts[not seen], 512, 1)
        held = picture_rows(examples, form, model.config, settings)
        share = right_answers(model, held, settings).mean()
        print(f"{task}: {100 * share:.1f} % of {held.num_rows} held-out images right")


if __name__ == "__main__":
    main()
