"""Writes a trained task head into a PEFT folder, beside its LoRA or alone."""

import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import load_file, save_file

from lora_jax.adapters.formats.head_format import BIAS, HEAD_FILE, POOLING, WEIGHT
from lora_jax.adapters.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from lora_jax.adapters.task_head import SCORE, TaskHead


def add_head(
    folder: pathlib.Path, head: TaskHead, weight: np.ndarray, bias: np.ndarray, dtype: np.dtype
) -> None:
    """Add a head, [size, hidden] and [size], to the adapter that `save_adapter` wrote."""
    tensors = load_file(folder / WEIGHTS_FILE)
    tensors |= {WEIGHT: np.asarray(weight).astype(dtype), BIAS: np.asarray(bias).astype(dtype)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config |= {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    _write(folder / CONFIG_FILE, config)
    meaning = {"kind": head.kind, "labels": list(head.labels), "pooling": POOLING}
    meaning |= {"queries": head.queries} if head.queries else {}
    _write(folder / HEAD_FILE, meaning)


def _write(path: pathlib.Path, value: dict) -> None:
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def copy_adapter(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write the two files of a PEFT adapter, which gets a head, to another folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(source / name, target / name)
