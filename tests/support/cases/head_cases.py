"""Adapters with task heads, written as PEFT folders."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from support.cases.tiny_checkpoint import TinyShape, write_adapter


def write_head(
    folder: Path,
    labels: list[str],
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    kind: str = "class",
    base: str = "tiny",
) -> None:
    """Write a head, [labels, hidden], into a folder; beside the LoRA that is there, if any."""
    file, config_file = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(file) if file.exists() else {}
    config = {"peft_type": "LORA", "r": 1, "target_modules": []}
    if config_file.exists():
        config = json.loads(config_file.read_text())
    tensors["base_model.model.score.weight"] = weight.astype(np.float32)
    if bias is not None:
        tensors["base_model.model.score.bias"] = bias.astype(np.float32)
    save_file(tensors, file)
    config["base_model_name_or_path"] = base
    config |= {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
    config_file.write_text(json.dumps(config))
    (folder / "task_head.json").write_text(json.dumps({"kind": kind, "labels": labels}))


def write_headed_adapter(
    folder: Path,
    shape: TinyShape,
    rank: int,
    seed: int,
    labels: list[str],
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    kind: str = "class",
) -> dict[str, np.ndarray]:
    """Write LoRA on every linear map, and a head; return name of the weight -> delta."""
    deltas = write_adapter(folder, shape, rank, seed)
    write_head(folder, labels, weight, bias, kind=kind)
    return deltas
