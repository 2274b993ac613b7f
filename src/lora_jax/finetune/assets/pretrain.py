"""Trains a base model from random weights and writes it as a checkpoint folder."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from lora_jax.config import from_hf
from lora_jax.finetune.documents import Document
from lora_jax.finetune.forward import forward
from lora_jax.finetune.packing import Rows, pack
from lora_jax.finetune.training import Schedule, fit, mean_loss
from lora_jax.models import build
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.moe import MoeBlock
from lora_jax.typing import Array, Float

BALANCE = 0.01  # weight of the router's balancing loss


def pretrain(
    raw_config: dict[str, Any],
    documents: Sequence[Document],
    length: int,
    schedule: Schedule,
    *,
    folder: pathlib.Path | None = None,
    stop_after: int | None = None,
) -> AbstractCausalLM:
    """Return a float32 model of a config.json, trained on every token of the documents.

    `folder` takes checkpoints and the loss log; a run that was stopped goes on from there.
    """
    model = build(from_hf(raw_config), jnp.float32, nnx.Rngs(schedule.seed))
    graphdef, state = nnx.split(model, graph=False)

    def loss(state: Any, _: None, batch: Rows) -> Float[Array, ""]:
        merged = nnx.merge(graphdef, state)
        out = forward(merged, batch.tokens, batch.positions, batch.segments)
        return mean_loss(out.logits, batch.targets, batch.weights) + BALANCE * out.imbalance

    text = pack(documents, length)
    trained = fit(
        state, None, loss, text, schedule, folder=folder, stop_after=stop_after, label="base"
    )
    return nnx.merge(graphdef, trained)


def save_qwen3_moe(
    model: AbstractCausalLM, raw_config: dict[str, Any], folder: pathlib.Path
) -> None:
    """Write config.json, generation_config.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(value).astype(ml_dtypes.bfloat16))
        for name, value in qwen3_moe_tensors(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {key: raw_config[key] for key in ("eos_token_id", "pad_token_id")}
    for name, value in (("config.json", raw_config), ("generation_config.json", generation)):
        text = json.dumps(value, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def qwen3_moe_tensors(model: AbstractCausalLM) -> dict[str, Array]:
    """Return the weights of a Qwen3-MoE with a tied head by their names in checkpoints."""
    tensors = {
        "model.embed_tokens.weight": model.embed.weight[...],
        "model.norm.weight": model.norm.weight[...],
    }
    for number, layer in enumerate(model.layers):
        prefix, attn, block = f"model.layers.{number}.", layer.attn, layer.mlp
        if not isinstance(block, MoeBlock):
            raise ValueError(f"layer {number} is no mixture of experts")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = getattr(attn, name).weight[...]
        tensors[f"{prefix}input_layernorm.weight"] = layer.input_norm.weight[...]
        tensors[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm.weight[...]
        tensors[f"{prefix}mlp.gate.weight"] = block.router.weight[...]
        for name in ("gate_proj", "up_proj", "down_proj"):
            for expert, weight in enumerate(getattr(block.experts, name)[...]):
                tensors[f"{prefix}mlp.experts.{expert}.{name}.weight"] = weight
    return tensors
