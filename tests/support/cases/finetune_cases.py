"""A checkpoint folder small enough to train in a test, and text to train it on."""

import dataclasses
import functools
import gzip
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.config import from_hf
from lora_jax.finetune import esft_text, training
from lora_jax.finetune.assets import tokenizer
from lora_jax.finetune.assets.pretrain import save_qwen3_moe
from lora_jax.finetune.documents import Document
from lora_jax.finetune.esft_export import save_esft
from lora_jax.finetune.esft_params import chosen_experts
from lora_jax.finetune.esft_scores import Selection
from lora_jax.finetune.forward import forward
from lora_jax.finetune.lora_params import LoraDelta, LoraPair, LoraSpec, init_lora
from lora_jax.finetune.packing import PackedText
from lora_jax.finetune.records import Record
from lora_jax.models import build, load
from lora_jax.nn.decoder import AbstractCausalLM

VOCAB = 280
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
# Maps in whole blocks of NF4.
WIDE_CONFIG = CONFIG | {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
RECORDS = [
    Record(f"what is {a} and {b}", f"it is {c}")
    for a, b, c in [("one", "two", "three"), ("two", "two", "four"), ("one", "one", "two")]
]


def make_folder(
    folder: pathlib.Path, scale: float = 1.0, config: Mapping[str, Any] = CONFIG
) -> pathlib.Path:
    """Write a random Qwen3-MoE, its weights times `scale`, with its own tokenizer."""
    texts = [f"{r.prompt} {r.answer}" for r in RECORDS] * 4
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(tokenizer.train_bpe(texts, VOCAB), folder, 64)
    graphdef, state = nnx.split(build(from_hf(dict(config))), graph=False)
    model = nnx.merge(graphdef, jax.tree.map(lambda p: p * scale, state))
    save_qwen3_moe(model, dict(config), folder)
    return folder


def make_esft(base: pathlib.Path, name: str, selection: Selection, seed: int) -> pathlib.Path:
    """Write base/esft/NAME: the chosen experts, changed at random and by much."""
    own = chosen_experts(load(base, dtype="float32")[0], selection)
    rng = np.random.default_rng(seed)
    changed = jax.tree.map(lambda w: w + jnp.float32(0.3 * rng.standard_normal(w.shape)), own)
    save_esft(base / "esft" / name, changed, selection)
    return base / "esft" / name


def share_compiled_step(monkeypatch) -> None:
    """Let all runs of a test, which must be of one model and loss, use the first one's program."""
    made, make_step = [], training.make_step

    def make(*args):
        if not made:
            made.append(make_step(*args))
        return made[0]

    monkeypatch.setattr(training, "make_step", make)


def fit_nothing(monkeypatch, module) -> list[PackedText]:
    """Let a module's training end at once; return the list that its texts are put into."""
    texts = []

    def fit(start, frozen, loss, text, *_, **__):
        texts.append(text)
        return start

    monkeypatch.setattr(module, "fit", fit)
    return texts


@dataclasses.dataclass(frozen=True)
class Fit:
    """One training that was asked for."""

    label: str
    text: Any  # documents or rows
    schedule: training.Schedule
    folder: pathlib.Path | None


def train_nothing(monkeypatch, module) -> list[Fit]:
    """Let a module's LoRA be its spec alone, which an evaluator gets in place of a delta.

    Returns the list that the trainings are put into.
    """
    fits = []

    def train_lora(model, documents, length, spec, schedule, *, folder=None, label="lora", **_):
        fits.append(Fit(label, documents, schedule, folder))
        return spec

    monkeypatch.setattr(module, "train_lora", train_lora)
    monkeypatch.setattr(module, "trained_delta", lambda pairs, spec, catalogue: pairs)
    return fits


def trace_training(monkeypatch, *modules) -> list[Fit]:
    """Let modules' training trace its loss on a batch, compile nothing, and return its start.

    A loss is traced once for each set of shapes. Returns the list that the trainings are put into.
    """
    fits, traced = [], set()

    def fit(start, frozen, loss, rows, schedule, *, folder=None, label="train", **_):
        batch = rows.take(training.batch_rows(rows.num_rows, 0, schedule))
        arrays, tree = jax.tree.flatten((start, frozen, batch))
        shapes = loss.__qualname__, tree, *((a.shape, str(a.dtype)) for a in arrays)
        if shapes not in traced:
            value = jax.eval_shape(loss, start, frozen, batch)
            assert (value.shape, value.dtype) == ((), jnp.float32)
            traced.add(shapes)
        fits.append(Fit(label, rows, schedule, folder))
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return start

    for module in modules:
        monkeypatch.setattr(module, "fit", fit)
    return fits


def write_domain(folder: pathlib.Path, domain: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Write folder/DOMAIN.jsonl.gz as the ESFT evaluation sets are: one solved and one asked."""
    task, lines = esft_text.TASKS[domain], []
    for (text, answer), (asked, last) in zip(pairs[::2], pairs[1::2], strict=True):
        shot = f"{task.question} {text}{task.answer} {answer}{task.stop}"
        prompt = f"User: {shot}\n\n{task.question} {asked}{task.answer}\n\nAssistant:"
        lines.append(json.dumps({"prompt": prompt, "raw_answers": [last]}))
    (folder / f"{domain}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def num_learned(documents: Sequence[Document], answer_only: bool) -> int:
    """How many tokens training should weigh: those of the answers, or all but the first."""
    first = [document.num_prompt if answer_only else 1 for document in documents]
    return sum(len(d.tokens) - f for d, f in zip(documents, first, strict=True))


def random_pairs(spec: LoraSpec, catalogue: LoraCatalogue, seed: int = 0) -> dict[str, LoraPair]:
    """Return pairs whose B is not zero, so that every site does something."""
    rng = np.random.default_rng(seed)
    return {
        name: LoraPair(a=p.a, b=jnp.float32(0.3 * rng.standard_normal(p.b.shape)))
        for name, p in sorted(init_lora(spec, catalogue, seed).items())
    }


def dense(model: AbstractCausalLM, inputs: tuple[jax.Array, ...], delta: LoraDelta | None = None):
    """Return what `forward` does, as one program: one by one its operators take seconds to compile.

    `inputs` are tokens, positions and segments.
    """
    graphdef, state = nnx.split(model, graph=False)
    return _program(graphdef)(state, inputs, delta)


@functools.cache
def _program(graphdef: nnx.GraphDef):
    def run(state, inputs, delta):
        return forward(nnx.merge(graphdef, state), *inputs, delta)

    return jax.jit(run)
