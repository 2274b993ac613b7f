"""Engines over the committed models whose adapters bring more than LoRA, and PEFT's answers."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from support.cases.tiny_checkpoint import write_tokenizer

from serving import Engine, Sampling

FIXTURES = Path(__file__).parents[2] / "fixtures" / "brought"
FAMILIES = ("llama", "qwen2", "qwen3_moe")
SPELLED = ("<pad>", "<s>", "</s>")  # so that the last of the models' tokens, 259, is to spare
SCORED = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)


def make_engine(folder: Path, family: str, **changes) -> Engine:
    """Return an engine over a family with all its adapters, in float32."""
    model = folder / f"{family}-model"
    if not model.exists():
        shutil.copytree(FIXTURES / family / "model", model)
        write_tokenizer(model, SPELLED)
    names = adapter_names(family)
    fields = {
        "adapters": {name: FIXTURES / family / name for name in names},
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
        "block_size": 4,
        "kv_cache_memory_bytes": 1 << 20,
        "max_loras": 8,
        "max_lora_rank": 4,
        "max_esft_adapters": 0,
        "structured_outputs": False,
    }
    return Engine(str(model), **(fields | changes))


def adapter_names(family: str) -> list[str]:
    """Return the adapters of a family, plain LoRA among them."""
    folders = (path for path in sorted((FIXTURES / family).iterdir()) if path.is_dir())
    return [path.name for path in folders if path.name != "model"]


def expected(family: str) -> tuple[list[list[int]], dict[str, list[np.ndarray]]]:
    """Return the prompts, and PEFT's log-probabilities of their tokens by adapter, or "base"."""
    with np.load(FIXTURES / family / "expected.npz") as arrays:
        found = dict(arrays)
    prompts = [found[f"prompt{i}"].tolist() for i in range(2)]
    names = ["base", *adapter_names(family)]
    return prompts, {name: [found[f"{name}{i}"] for i in range(2)] for name in names}


def answers(engine: Engine, asked: list[tuple[list[int], str | None]]) -> list:
    """Return what each request sees: log-probabilities of the prompt, tokens, and theirs."""
    prompts, adapters = zip(*asked, strict=True)
    outputs = engine.generate(list(prompts), list(adapters), SCORED)
    return [
        (
            [entry.logprob for entry in output.prompt_logprobs[1:]],
            output.outputs[0].token_ids,
            [entry.logprob for entry in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def write_own_rows(folder: Path, vocab: int, hidden: int, *, saved: bool) -> None:
    """Give the LoRA in a folder trained tokens, or with `saved` a head of its own."""
    file, config_file = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    rng, tensors, ids = np.random.default_rng(0), load_file(file), list(range(min(vocab, 32)))
    at = "base_model.model."
    if saved:
        tensors[f"{at}lm_head.weight"] = rng.normal(size=(vocab, hidden)).astype("f4")
        more: dict = {"modules_to_save": ["lm_head"]}
    else:
        name = f"{at}model.embed_tokens.token_adapter.trainable_tokens_delta"
        tensors[name] = rng.normal(size=(len(ids), hidden)).astype("f4")
        more = {"trainable_token_indices": ids}
    save_file(tensors, file)
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | more))


def write_own_tokens(folder: Path, family: str, token_id: int = 259) -> None:
    """Write a family's adapter of trained tokens, one of which its tokenizer spells "<call>"."""
    shutil.copytree(FIXTURES / family / "tokens", folder)
    config_file = folder / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["trainable_token_indices"] = [259, *config["trainable_token_indices"][1:]]
    config_file.write_text(json.dumps(config))
    write_tokenizer(folder, SPELLED)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = dict(tokenizer["added_tokens"][0], id=token_id, content="<call>", special=False)
    file.write_text(json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]}))


def write_dora(folder: Path) -> None:
    """Make DoRA of the LoRA in a folder, with magnitudes of no particular meaning."""
    file, config_file = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    rng, tensors = np.random.default_rng(0), load_file(file)
    for name in sorted(tensors):
        if name.endswith(".lora_B.weight"):
            path, width = name.removesuffix(".lora_B.weight"), len(tensors[name])
            magnitude = rng.uniform(0.5, 2, width).astype(np.float32)
            tensors[f"{path}.lora_magnitude_vector"] = magnitude
    save_file(tensors, file)
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"use_dora": True}))
