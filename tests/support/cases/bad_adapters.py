"""Adapter folders with one thing wrong each, made from a good one."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from support.cases.tiny_checkpoint import TinyShape, write_adapter
from support.cases.tiny_esft import write_esft_adapter

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrite the weights after `change` has had its way with them."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder: Path, **values: object) -> None:
    """Set keys of the adapter's config."""
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


def first(tensors: dict[str, np.ndarray], end: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(end))


def missing_b(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(first(t, "lora_B.weight")))


def extra_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"base_model.model.surprise": np.zeros(3, "f4")}))


def nan_weights(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[first(t, "lora_A.weight")].fill(np.nan))


def rank_pattern(folder: Path) -> None:
    edit_config(folder, rank_pattern={"q_proj": "lots"})


def wrong_rank_pattern(folder: Path) -> None:
    edit_config(folder, rank_pattern={"q_proj": 99})


def unknown_key(folder: Path) -> None:
    edit_config(folder, use_dora=True)


def bin_file(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def huge_header(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + data[8:])


def no_json(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def other_size(folder: Path) -> None:
    write_adapter(folder, TinyShape(hidden=64, width=96, experts=4), rank=4, seed=9)


def other_kind(folder: Path) -> None:
    write_adapter(folder, TinyShape(), rank=4, seed=9)


# Name of the folder -> what is done to it, and a word that the error must have.
BAD = {
    "missing-b": (missing_b, "lora_B"),
    "extra-tensor": (extra_tensor, "surprise"),
    "nan-weights": (nan_weights, "lora_A"),
    "rank-pattern": (rank_pattern, "rank_pattern"),
    "wrong-rank-pattern": (wrong_rank_pattern, "q_proj"),
    "unknown-key": (unknown_key, "use_dora"),
    "bin-file": (bin_file, "adapter_model.bin"),
    "truncated": (truncated, WEIGHTS),
    "huge-header": (huge_header, "header"),
    "no-json": (no_json, CONFIG),
    "other-size": (other_size, "64"),
    "other-kind": (other_kind, "down_proj"),
}


def write_bad_adapters(root: Path, good: Path) -> None:
    """Make every folder of BAD below the root."""
    for name, (change, _) in BAD.items():
        shutil.copytree(good, root / name)
        change(root / name)


def write_bad_esft(root: Path, base: Path) -> dict[str, str]:
    """Make ESFT folders below the root with one thing wrong each; name -> a word of the error."""
    for name, experts in {"esft-missing": {0: (1,)}, "esft-layer": {0: (1,)}}.items():
        write_esft_adapter(root / name, base, experts, 1)
    weights = root / "esft-missing" / "part-0.safetensors"
    tensors = load_file(weights)
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, weights)
    config = {"experts": {"0": [1], "9": [0]}}
    (root / "esft-layer" / "expert_cfg.json").write_text(json.dumps(config))
    return {"esft-missing": "layer 0, expert 1, gate_proj", "esft-layer": "layers 9"}
