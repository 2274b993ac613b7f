"""Features of an engine, how each is turned on, and the pairs that are refused by name."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.cases import lora_server_cases, tiny_esft
from support.cases.brought_cases import write_dora, write_own_rows
from support.cases.engine_cases import settle
from support.cases.head_cases import write_head
from support.cases.tiny_vision import (
    HOLDER,
    picture,
    write_qwen3_vl,
    write_vision_adapter,
    write_vision_esft,
)

from lora_jax.memory.arena import ImportedArena
from lora_jax.memory.host import HostMemory
from lora_jax.models.loader import read_config
from lora_jax.models.shared_weights import load_into_arena
from lora_jax.quantize import quantize
from serving import Engine, Sampling

SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 200 << 10,
    "max_loras": 3,
    "max_lora_rank": 4,
}
WIDTH = 64  # of hidden states and experts: whole groups of quantised weights
VISION = "tiny"  # the base that the files of write_vision_adapter name
VISION_MOE = "mixture"

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@dataclasses.dataclass(frozen=True)
class Feature:
    """`fields` turn it on; with `keeps_bits` answers are those of an engine without it."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    keeps_bits: bool = False


FEATURES = {
    "ESFT": Feature({"max_esft_adapters": 1}, keeps_bits=True),
    "images": Feature(),
    "task heads": Feature({"max_lora_cls_labels": 3}, keeps_bits=True),
    "DoRA and biases": Feature({"enable_dora_and_bias": True}, keeps_bits=True),
    "tokens and saved modules": Feature(
        {"max_lora_trainable_tokens": 32, "max_lora_modules_to_save": 1}, keeps_bits=True
    ),
    "chosen modules": Feature({"lora_target_modules": ("auto",)}, keeps_bits=True),
    "structured outputs": Feature({"structured_outputs": True}, keeps_bits=True),
    "speculation": Feature({"speculative_config": SPECULATIVE}, keeps_bits=True),
    "merged modes": Feature({"lora_merge": "exact"}),
    "merged primary": Feature({"merge_adapter": "one"}),
    "quantised base": Feature(),
    "adapters in 8 bits": Feature({"lora_dtype": "int8"}),
    "KV cache in 8 bits": Feature({"kv_cache_dtype": "fp8"}),
    # Of one sequence at a time: few pages, which soon leave the device.
    "KV pages on the host": Feature(
        {"kv_offloading_size": 0.001, "max_num_seqs": 1, "max_model_len": 24},
        keeps_bits=True,
    ),
    "page pool": Feature(
        {"page_pool_bytes": 800 << 10, "kv_cache_memory_bytes": None, "block_size": 8},
        keeps_bits=True,
    ),
    "several devices": Feature({"tensor_parallel_size": 2}, keeps_bits=True),
    "LoRA Server": Feature(),
    "shared backbone": Feature(keeps_bits=True),
}
# Pairs that an engine refuses at its start, with words of its message.
REFUSED = {
    ("ESFT", "quantised base"): "max_esft_adapters",
    ("ESFT", "shared backbone"): "max_esft_adapters 1",
    ("task heads", "LoRA Server"): "Task heads are not served beside a LoRA Server",
    ("DoRA and biases", "merged primary"): "enable_dora_and_bias does not go with merge_adapter",
    ("DoRA and biases", "several devices"): "does not go with tensor_parallel_size",
    ("DoRA and biases", "LoRA Server"): "enable_dora_and_bias does not go with a LoRA Server",
    ("tokens and saved modules", "merged primary"): "max_lora_trainable_tokens does not go with",
    ("tokens and saved modules", "adapters in 8 bits"): "max_lora_modules_to_save does not go with",
    ("tokens and saved modules", "several devices"): "does not go with tensor_parallel_size",
    ("tokens and saved modules", "LoRA Server"): "does not go with a LoRA Server",
    ("chosen modules", "LoRA Server"): "lora_target_modules is for adapters that the instances",
    ("images", "LoRA Server"): "has none in this config",
    ("images", "shared backbone"): "a model that takes images",
    ("merged modes", "merged primary"): "set one of them",
    ("merged modes", "quantised base"): "quantised weights would be rounded",
    ("merged modes", "adapters in 8 bits"): "rows in 8 bits",
    ("merged modes", "several devices"): "is for one device",
    ("merged modes", "LoRA Server"): "a LoRA Server holds",
    ("merged modes", "shared backbone"): "lora_merge exact",
    ("merged primary", "quantised base"): "quantised weights would be rounded",
    ("merged primary", "adapters in 8 bits"): "rows in 8 bits",
    ("merged primary", "several devices"): "is for one device",
    ("merged primary", "LoRA Server"): "a LoRA Server holds",
    ("merged primary", "shared backbone"): "merge_adapter one",
    ("speculation", "LoRA Server"): "compute all of an adapter",
    ("KV pages on the host", "page pool"): "page_pool_bytes does not go with kv_offloading_size",
    ("merged modes", "page pool"): "page_pool_bytes does not go with lora_merge",
    ("merged primary", "page pool"): "page_pool_bytes does not go with merge_adapter",
    ("page pool", "several devices"): "page_pool_bytes does not go with tensor_parallel_size",
    ("page pool", "LoRA Server"): "page_pool_bytes does not go with lora server",
    ("page pool", "shared backbone"): "page_pool_bytes does not go with shared backbone",
    ("several devices", "shared backbone"): "tensor_parallel_size 2",
    ("LoRA Server", "shared backbone"): "lora_server",
}
PAIRS = list(itertools.combinations(FEATURES, 2))
WORKING = [pair for pair in PAIRS if pair not in REFUSED]


class Models:
    """Folders of tiny models and adapters, written when they are asked for."""

    def __init__(self, root: Path):
        self.root = root
        self._answers: dict[tuple[frozenset[str], str], dict[str, Any]] = {}

    def folder(self, features: frozenset[str], kind: str) -> tuple[Path, dict[str, Path]]:
        """Return the model of a kind for `features`, and its LoRA adapters."""
        base = self.root / kind
        adapters = {name: self.root / f"{kind}-{name}" for name in ("one", "two")}
        if not base.exists() and kind != "text":
            write_qwen3_vl(base, moe=kind == VISION_MOE)
            for seed, path in enumerate(adapters.values()):
                write_vision_adapter(path, seed, tower=False, rank=2)
            if kind == VISION_MOE:
                write_vision_esft(self.root / f"{kind}-esft", {0: (1, 3), 2: (0,)}, 7)
        elif not base.exists():
            size = {"hidden": WIDTH, "width": WIDTH}
            tiny_esft.write_moe(base, "qwen3_moe", **size)
            tiny_esft.write_esft_adapter(self.root / "text-esft", base, {0: (1, 3), 2: (0,)}, 7)
            tiny_esft.write_lora_adapter(adapters["two"], "qwen3_moe", 2, 1, **size)
            write_dense_adapter(adapters["one"])
        if "quantised base" in features:
            copy = self.root / "nf4" / kind  # the name stays: heads are refused on others
            if not copy.exists():
                quantize(base, "nf4", copy)
            base = copy
        return base, adapters

    @contextlib.contextmanager
    def engine(self, features: frozenset[str], kind: str | None = None) -> Iterator[Engine]:
        """Start an engine with `features`, over the model of a pair's `kind` where one is named.

        Raises ValueError when a pair of them is refused.
        """
        kind = kind or kind_of(features)
        folder, adapters = self.folder(features, kind)
        if "ESFT" in features:
            adapters = adapters | {"esft": self.root / f"{kind}-esft"}
        if "task heads" in features:
            adapters = adapters | {"head": self._head(adapters["one"])}
        if "DoRA and biases" in features:
            adapters = adapters | {"DoRA": self._dora(adapters["one"])}
        if "tokens and saved modules" in features:
            adapters = adapters | self._own_rows(adapters["one"])
        fields: dict[str, Any] = SIZES | {"structured_outputs": False, "max_esft_adapters": None}
        for name in features:
            fields |= FEATURES[name].fields
        if "ESFT" not in features:
            fields["max_esft_adapters"] = 0
        with contextlib.ExitStack() as stack:
            if "LoRA Server" in features:
                kept = fields.get("lora_dtype", "auto")
                spec = lora_server_cases.make_spec(str(folder), "ep2-pp1", lora_dtype=kept)
                ranks = stack.enter_context(lora_server_cases.running(spec))
                fields["lora_server"] = ranks.access()
            if "shared backbone" in features:
                fields["backbone"] = _backbone(folder)
            yield stack.enter_context(Engine(folder, adapters, **fields))

    def _head(self, lora: Path) -> Path:
        """Return a copy of a LoRA adapter, with a task head beside it."""
        folder = lora.with_name(f"{lora.name}-head")
        if not folder.exists():
            shutil.copytree(lora, folder)
            base = lora.name.partition("-")[0]
            hidden = read_config(self.root / base).hidden_size
            weight = np.random.default_rng(4).normal(size=(3, hidden)).astype(np.float32)
            write_head(folder, ["no", "yes", "both"], weight, base=base)
        return folder

    def _dora(self, lora: Path) -> Path:
        """Return a copy of a LoRA adapter, as DoRA with other magnitudes."""
        folder = lora.with_name(f"{lora.name}-dora")
        if not folder.exists():
            shutil.copytree(lora, folder)
            write_dora(folder)
        return folder

    def _own_rows(self, lora: Path) -> dict[str, Path]:
        """Return copies of a LoRA adapter, one with trained tokens and one with its own head."""
        config = read_config(self.root / lora.name.partition("-")[0])
        made = {"tokens": lora.with_name(f"{lora.name}-tokens")}
        made |= {"saved": lora.with_name(f"{lora.name}-saved")}
        for name, folder in made.items():
            if not folder.exists():
                shutil.copytree(lora, folder)
                size = (config.vocab_size, config.hidden_size)
                write_own_rows(folder, *size, saved=name == "saved")
        return made

    def answers(self, *names: str, pair: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return what an engine with these features answers, by the kind of request.

        It has the model that an engine with the features of `pair` has.
        """
        features, kind = frozenset(names), kind_of(frozenset(pair or names))
        key = features, kind
        if key not in self._answers:
            with self.engine(features, kind) as engine:
                asked = requests(engine, features)
                alone = {kind: _answer(engine, [one])[0] for kind, one in asked.items()}
                together = _answer(engine, list(asked.values()))
                settle(engine)  # checks, too
                assert engine.stats().compilations_after_warmup == 0
                if "KV pages on the host" in features and len(asked) > 1:
                    assert engine.stats().host_pages.moved_in
                if "task heads" in features and "merged primary" not in features:
                    (label,) = engine.classify(["abcabc"], "head")
                    heads = {"head": label.outputs}
                else:
                    heads = {}
            assert dict(zip(asked, together, strict=True)) == alone
            alone |= heads
            self._answers[key] = alone
        return self._answers[key]


def kind_of(features: frozenset[str]) -> str:
    """Return the kind of model that engines with these features have."""
    if "images" not in features:
        return "text"
    return VISION_MOE if "ESFT" in features else VISION


def write_dense_adapter(folder: Path) -> None:
    """Write a PEFT LoRA on o_proj of every layer: what merged weights can stand for."""
    rng, tensors = np.random.default_rng(3), {}
    for layer in range(tiny_esft.LAYERS):
        at = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{at}.lora_A.weight"] = rng.normal(size=(2, tiny_esft.HIDDEN)).astype(np.float32)
        tensors[f"{at}.lora_B.weight"] = rng.normal(size=(WIDTH, 2)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _backbone(folder: Path) -> ImportedArena:
    _, _, arena = load_into_arena(folder, HostMemory())
    descriptors = arena.export()
    try:
        return ImportedArena(HostMemory(), arena.manifest, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def requests(engine: Engine, features: frozenset[str]) -> dict[str, tuple]:
    """Return prompt, adapter, sampling and images of one request of each kind."""
    scored = Sampling(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    drawn = dataclasses.replace(scored, temperature=1.0, seed=5, top_k=20)
    prompt = "abcabcabcabc"
    if "merged primary" in features:
        return {"one": (prompt, "one", scored, [])}
    asked: dict[str, tuple] = {
        "base": (prompt, None, scored, []),
        "one": (prompt, "one", scored, []),
        "two, drawn": (prompt, "two", drawn, []),
    }
    if "LoRA Server" not in features:
        asked["sum"] = (prompt, {"one": 0.5, "two": 1.0}, scored, [])
    if "DoRA and biases" in features:
        asked["DoRA"] = (prompt, "DoRA", scored, [])
    if "tokens and saved modules" in features:
        asked |= {name: (prompt, name, scored, []) for name in ("tokens", "saved")}
    if "ESFT" in features:
        asked["ESFT"] = (prompt, "esft", scored, [])
    if "images" in features:
        asked["image"] = (f"{HOLDER}ab", "one", scored, [picture(24, 16, 1)])
    if "structured outputs" in features:
        bound = dataclasses.replace(scored, structured_outputs={"regex": "[ab]{5}"})
        asked["bound"] = (prompt, "one", bound, [])
    return asked


def _answer(engine: Engine, asked: list[tuple]) -> list[tuple]:
    prompts, adapters, samplings, images = (list(each) for each in zip(*asked, strict=True))
    more = {"images": images} if engine.images is not None else {}
    outputs = engine.generate(prompts, adapters, samplings, **more)
    return [
        (tuple(c.token_ids), tuple((p.logprob, tuple(p.top.items())) for p in c.logprobs))
        for (c,) in (output.outputs for output in outputs)
    ]


def table() -> str:
    """Return the pairs as a table in Markdown: `yes`, or `no` where an engine refuses them."""
    names = list(FEATURES)
    lines = ["| | " + " | ".join(names[1:]) + " |", "| --- |" + " --- |" * (len(names) - 1)]
    for row, name in enumerate(names[:-1]):
        cells = [
            "" if column <= row else "no" if (name, other) in REFUSED else "yes"
            for column, other in enumerate(names)
        ][1:]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
