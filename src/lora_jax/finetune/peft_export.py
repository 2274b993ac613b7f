"""Writes trained LoRA as PEFT does: adapter_config.json and adapter_model.safetensors."""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lora_jax.adapters.catalogue import UNQUANTISED, LoraCatalogue
from lora_jax.adapters.formats.peft_format import BASE_QUANTIZATION
from lora_jax.finetune.lora_params import FUSED, GATE, UP, LoraParams, LoraSpec

DOWN = "experts.down_proj"
MIXTRAL_NAMES = {GATE: "w1", UP: "w3", DOWN: "w2"}
PREFIX = "base_model.model."


def save_adapter(
    folder: pathlib.Path,
    params: LoraParams,
    spec: LoraSpec,
    catalogue: LoraCatalogue,
    *,
    base_name: str,
    dtype: np.dtype | type = np.float32,
    quantization: str = UNQUANTISED,
) -> None:
    """Write a folder that PEFT and any server of PEFT adapters reads; weights in `dtype`.

    The file notes `quantization`, the format of the base's weights in training.

    Raises ValueError naming a module that PEFT files of this base model have no name for.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, pair in params.items():
        module = catalogue.modules[GATE if name == FUSED else name]
        for index, layer in enumerate(module.layers):
            a, b = np.asarray(pair.a[index]), np.asarray(pair.b[index])
            tensors |= site_tensors(name, layer, a, b, spec, catalogue)
    tensors = {k: np.ascontiguousarray(v.astype(dtype)) for k, v in sorted(tensors.items())}
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", BASE_QUANTIZATION: quantization}
    save_file(tensors, folder / "adapter_model.safetensors", metadata=metadata)
    config = json.dumps(adapter_config(spec, catalogue, base_name), indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(config + "\n", encoding="utf-8")


def site_tensors(
    name: str,
    layer: int,
    a: np.ndarray,
    b: np.ndarray,
    spec: LoraSpec,
    catalogue: LoraCatalogue,
) -> dict[str, np.ndarray]:
    """Return the named tensors of one pair [experts rank width]: one pair, one per expert, or
    the flat one of fused experts (A expert-major, B with the expert index fastest).
    """
    if name == FUSED or (spec.fused_experts and name == DOWN):
        both = FUSED in params_on_disk(spec) and DOWN in params_on_disk(spec)
        suffix = ".base_layer" if name == FUSED and both else ""
        path = f"{PREFIX}model.layers.{layer}.mlp.experts{suffix}"
        flat_a, flat_b = a.reshape(-1, a.shape[2]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)
        return {f"{path}.lora_A.weight": flat_a, f"{path}.lora_B.weight": flat_b}
    tensors = {}
    for expert in range(a.shape[0]):
        path = PREFIX + module_path(name, layer, expert, catalogue)
        tensors[f"{path}.lora_A.weight"] = a[expert]
        tensors[f"{path}.lora_B.weight"] = b[expert].T
    return tensors


def params_on_disk(spec: LoraSpec) -> tuple[str, ...]:
    """Return the modules as files name them: gate and up of fused experts as one."""
    fused = spec.fused_experts and GATE in spec.modules
    plain = [m for m in spec.modules if not (fused and m in (GATE, UP))]
    return (*plain, FUSED) if fused else tuple(plain)


def module_path(name: str, layer: int, expert: int, catalogue: LoraCatalogue) -> str:
    """Return the path of a module, which the base model's own rules must lead back to it."""
    block = f"model.layers.{layer}"
    kind, _, leaf = name.rpartition(".")
    if name == "lm_head":
        path = name
    elif name.startswith("visual."):
        path = _tower_path(name.removeprefix("visual."), layer)
    elif kind == "experts" and catalogue.model_type == "mixtral":
        path = f"{block}.block_sparse_moe.experts.{expert}.{MIXTRAL_NAMES[name]}"
    elif kind == "experts":
        path = f"{block}.mlp.experts.{expert}.{leaf}"
    elif name == "router":
        path = f"{block}.mlp.{'router' if catalogue.model_type == 'gpt_oss' else 'gate'}"
    elif kind == "shared_experts" or leaf in ("gate_proj", "up_proj", "down_proj"):
        path = f"{block}.mlp.{name}"
    else:
        path = f"{block}.self_attn.{name}"
    if not any(rule.module == name and rule.pattern.fullmatch(path) for rule in catalogue.rules):
        raise ValueError(f"{catalogue.model_type}: no file name is known for module {name}")
    return path


def _tower_path(name: str, layer: int) -> str:
    """Return the path of a module of Qwen3-VL's tower."""
    if name.startswith("merger."):
        return f"model.visual.{name}"
    lists, _, leaf = name.partition(".")
    if lists == "deepstack_merger_list":
        return f"model.visual.{lists}.{layer}.{leaf}"
    return f"model.visual.blocks.{layer}.{name}"


def adapter_config(spec: LoraSpec, catalogue: LoraCatalogue, base_name: str) -> dict[str, Any]:
    """Return adapter_config.json; fused experts are `target_parameters`, the rest modules."""
    names = params_on_disk(spec)
    fused = {FUSED, DOWN} & set(names) if spec.fused_experts else set()
    leaves = {leaf_name(name, catalogue) for name in names if name not in fused}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": sorted(leaves),
        "target_parameters": sorted(f"mlp.{name}" for name in fused) or None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "use_dora": False,
    }


def leaf_name(name: str, catalogue: LoraCatalogue) -> str:
    """Return the last word of a module's path."""
    layer = catalogue.modules[name].layers[0]
    return module_path(name, layer, 0, catalogue).rpartition(".")[2]
