"""Makes assets/tiny-moe: tokenizer, base, LoRA and ESFT adapters, perplexities on held-out text.

    python -m lora_jax.finetune.assets.make_assets --data DIR --out assets/tiny-moe
    python -m lora_jax.finetune.assets.make_assets --data DIR --out assets/tiny-moe --esft-only NAME

DIR holds the ESFT evaluation sets intent, law, summary and translation as .jsonl.gz (deepseek-ai/
ESFT, datasets/eval). Held-out text is set apart before anything else is made of the data. Run
again after an interruption, the command goes on from its newest checkpoint in --state. The second
form trains the named ESFT adapters, or all, on the base that lies in --out and leaves all else
there as it is.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from lora_jax.finetune.assets import esft_results, results, tokenizer
from lora_jax.finetune.assets.pretrain import pretrain, save_qwen3_moe
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.esft import choose, train_esft
from lora_jax.finetune.esft_export import save_esft
from lora_jax.finetune.esft_text import TASKS, Split, read_domain, split, with_parts
from lora_jax.finetune.lora import train_lora
from lora_jax.finetune.lora_params import LoraSpec
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.records import Record, write_jsonl
from lora_jax.finetune.training import Schedule
from lora_jax.models import load

HELDOUT_SHARE = 0.08
LENGTH = 512
# The base learns from a sixth of each domain, an adapter from all of its own: a base that had
# seen everything many times would leave an adapter nothing to learn from so little text.
BASE_EVERY = 6
PLAIN_EVERY = 3  # of the base's records, each third also comes as one running text
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
BASE_SCHEDULE = Schedule(
    steps=500,
    batch_rows=4,
    learning_rate=4e-3,
    warmup_steps=40,
    weight_decay=0.3,
    checkpoint_every=50,
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


@dataclasses.dataclass(frozen=True)
class LoraRecipe:
    """One adapter of the shipped model: what it changes, how long it learns, how it is stored."""

    spec: LoraSpec
    steps: int
    dtype: np.dtype

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            steps=self.steps,
            batch_rows=4,
            learning_rate=6e-3,
            warmup_steps=10,
            weight_decay=0.3,
            checkpoint_every=50,
        )


F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
# Different ranks, layouts and dtypes on purpose: what servers meet.
LORA_RECIPES = {
    "intent": LoraRecipe(LoraSpec(4, 8.0, ("q_proj", "v_proj", *EXPERTS)), 300, F32),
    "law": LoraRecipe(LoraSpec(16, 8.0, ATTENTION + EXPERTS, use_rslora=True), 300, BF16),
    "summary": LoraRecipe(LoraSpec(12, 24.0, ATTENTION + EXPERTS), 300, BF16),
    "translation": LoraRecipe(
        LoraSpec(8, 16.0, ATTENTION + EXPERTS, fused_experts=False), 150, BF16
    ),
}


@dataclasses.dataclass(frozen=True)
class EsftRecipe:
    """One ESFT adapter of the shipped model: its text or part of one, and its recipe."""

    text: str
    score: str
    top_p: float


# Named as ExpertWeave's Table 1 names its own: score, then text. Its other two are of mathematics;
# here they are parts of two texts. The thresholds are above ESFT's (0.2 and 0.1): with 8 experts of
# which 2 are used, a single one often has that much.
ESFT_RECIPES = {
    "gate-intent": EsftRecipe("intent", "gate", 0.4),
    "token-intent": EsftRecipe("intent", "token", 0.4),
    "gate-law": EsftRecipe("law", "gate", 0.35),
    "token-law": EsftRecipe("law", "token", 0.4),
    "gate-summary": EsftRecipe("summary", "gate", 0.4),
    "token-summary": EsftRecipe("summary", "token", 0.4),
    "gate-translation": EsftRecipe("translation", "gate", 0.4),
    "token-translation": EsftRecipe("translation", "token", 0.4),
    "gate-archaic": EsftRecipe("archaic", "gate", 0.4),
    "token-media": EsftRecipe("media", "token", 0.4),
}
ESFT_SCHEDULE = Schedule(
    steps=100, batch_rows=4, learning_rate=5e-3, warmup_steps=10, checkpoint_every=50
)


def read_splits(data: pathlib.Path) -> dict[str, Split]:
    """Return training and held-out records of each domain."""
    return {name: split(read_domain(data, name), HELDOUT_SHARE, name) for name in TASKS}


def make_base(splits: dict[str, Split], out: pathlib.Path, state: pathlib.Path) -> None:
    """Train the tokenizer on all training text, the base model on a part of it, and write them."""
    texts = [f"{r.prompt}\n{r.answer}" for part in splits.values() for r in part.train]
    bpe = tokenizer.train_bpe(texts, CONFIG["vocab_size"])
    tokenizer.save(bpe, out, CONFIG["max_position_embeddings"])
    form = read_format(out)
    documents = []
    for part in splits.values():
        seen = part.train[::BASE_EVERY]
        documents += form.documents(seen, "chat")
        documents += form.documents(seen[::PLAIN_EVERY], "plain")
    model = pretrain(CONFIG, documents, LENGTH, BASE_SCHEDULE, folder=state / "base")
    save_qwen3_moe(model, CONFIG, out)


def make_adapter(
    name: str, records: tuple[Record, ...], out: pathlib.Path, state: pathlib.Path
) -> None:
    """Train one domain's adapter on the base as it is stored, and write it."""
    model, config = load(out, dtype="float32")
    recipe = LORA_RECIPES[name]
    params = train_lora(
        model,
        read_format(out).documents(records, "chat"),
        LENGTH,
        recipe.spec,
        recipe.schedule,
        folder=state / name,
        label=name,
    )
    folder, catalogue = out / "adapters" / name, model.catalogue(config)
    save_adapter(folder, params, recipe.spec, catalogue, base_name=out.name, dtype=recipe.dtype)


def make_esft(name: str, records: Sequence[Record], out: pathlib.Path, state: pathlib.Path) -> None:
    """Select and train one text's experts of the base as it is stored, and write them."""
    model, _ = load(out, dtype="float32")
    recipe, documents = ESFT_RECIPES[name], read_format(out).documents(records, "chat")
    selection = choose(model, documents, LENGTH, recipe.score, recipe.top_p, state / name)
    params = train_esft(
        model, documents, LENGTH, selection, ESFT_SCHEDULE, folder=state / name, label=name
    )
    save_esft(out / "esft" / name, params, selection)


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.assets.make_assets")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument(
        "--state", type=pathlib.Path, help="folder of checkpoints (default: OUT.training)"
    )
    parser.add_argument(
        "--esft-only",
        nargs="*",
        choices=ESFT_RECIPES,
        metavar="NAME",
        help="ESFT adapters to train (default: all)",
    )
    args = parser.parse_args(argv)
    state = args.state or args.out.with_name(args.out.name + ".training")
    splits = read_splits(args.data)
    args.out.mkdir(parents=True, exist_ok=True)
    heldout = {name: part.heldout for name, part in splits.items()}
    (state / "heldout").mkdir(parents=True, exist_ok=True)
    for name, records in heldout.items():
        write_jsonl(state / "heldout" / f"{name}.jsonl", records)
    if args.esft_only is None:
        make_base(splits, args.out, state)
        for name, part in splits.items():
            make_adapter(name, part.train, args.out, state)
        results.write_results(args.out, heldout)
    trained = with_parts({name: part.train for name, part in splits.items()})
    for name in args.esft_only or ESFT_RECIPES:
        make_esft(name, trained[ESFT_RECIPES[name].text], args.out, state)
    esft_results.write_results(args.out, heldout)


if __name__ == "__main__":
    main(sys.argv[1:])
