"""Writes trained experts as ESFT does, and checkpoints in which they stand for the base's.

An ESFT folder (github.com/deepseek-ai/ESFT, esft.py) is expert_cfg.json and safetensors with the
whole matrices of the chosen experts, under their names in a checkpoint, and nothing else.
"""

import pathlib
import shutil

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from lora_jax.finetune.esft_params import PROJECTIONS, EsftParams
from lora_jax.finetune.esft_scores import Selection, write_config
from lora_jax.models.checkpoint import Checkpoint, checkpoint_files

WEIGHTS_FILE = "model.safetensors"


def save_esft(folder: pathlib.Path, params: EsftParams, selection: Selection) -> None:
    """Write FOLDER/expert_cfg.json and FOLDER/model.safetensors, weights in bfloat16."""
    write_config(folder, selection)
    tensors = {}
    for layer, weights in params.items():
        for index, expert in enumerate(selection[layer]):
            for name in PROJECTIONS:
                value = np.asarray(getattr(weights, name)[index]).astype(ml_dtypes.bfloat16)
                tensors[tensor_name(layer, expert, name)] = np.ascontiguousarray(value)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def tensor_name(layer: int, expert: int, projection: str) -> str:
    """Return the name of one matrix in an ESFT file."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the tensors of a folder that `save_esft` wrote."""
    return load_file(folder / WEIGHTS_FILE)


def merge_checkpoint(base: pathlib.Path, adapter: pathlib.Path, out: pathlib.Path) -> None:
    """Write the base's checkpoint with the adapter's experts for its own, and its other files.

    Raises ValueError naming tensors that the base has not, or has in another shape: a base that
    stores its experts fused or under other names is not merged.
    """
    new, stored = read_tensors(adapter), Checkpoint(base).tensors
    missing = sorted(new.keys() - stored.keys())
    if missing:
        raise ValueError(f"{base.name} has no tensors {missing[:5]} ({len(missing)} in all)")
    for name, value in new.items():
        if value.shape != stored[name].shape:
            raise ValueError(f"{name} is {value.shape}, the base's {stored[name].shape}")
    out.mkdir(parents=True, exist_ok=True)
    for file in (f for f in base.iterdir() if f.suffix == ".json"):
        shutil.copyfile(file, out / file.name)
    for file in checkpoint_files(base):
        tensors = load_file(file)
        for name in tensors.keys() & new.keys():
            tensors[name] = new[name].astype(tensors[name].dtype)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
