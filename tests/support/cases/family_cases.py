"""Random models of every family, wide enough for the GPU's kernels, and what they should say.

transformers makes them and PEFT their adapters; both say in float32 what each token of a prompt is
worth. Weights are bfloat16 numbers, so that engines of either dtype have the same ones.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from support.cases.tiny_checkpoint import write_tokenizer

LENGTHS = (17, 40, 70)
_VOCAB, _WINDOW = 512, 32
_SIZES = {
    "vocab_size": _VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_FAMILIES = {
    "Llama": {"head_dim": 128},
    "Mistral": {"head_dim": 64, "sliding_window": _WINDOW},
    "Qwen2": {},
    "Qwen3": {"head_dim": 64},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 64, "num_experts": 4} | _MOE,
    "GptOss": {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"sliding_window": _WINDOW},
    "DeepseekV2": _MLA | _MOE,
}
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Family:
    """A checkpoint, its adapter, and the log-probability of each token of prompts but the first."""

    model: Path
    adapter: Path
    prompts: list[list[int]]
    base: list[np.ndarray]
    adapted: list[np.ndarray]


def make_family(name: str, rank: int, folder: Path) -> Family:
    """Write a model of a family and an adapter of a rank to `folder`."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(_SIZES | _FAMILIES[name]))
    kind = getattr(transformers, f"{name}ForCausalLM")
    drawn = kind(config)
    with torch.no_grad():
        for parameter in drawn.parameters():
            if parameter.ndim > 1:  # activations keep their size
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model, adapter = folder / "model", folder / "adapter"
    drawn.to(torch.bfloat16).save_pretrained(model)
    write_tokenizer(model)
    oracle = kind.from_pretrained(model, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, _VOCAB, length).tolist() for length in LENGTHS]
    base = _scores(oracle, prompts)
    adapted = _with_adapter(oracle, rank)
    adapted.save_pretrained(adapter)
    return Family(model, adapter, prompts, base, _scores(adapted, prompts))


def _with_adapter(oracle: Any, rank: int) -> Any:
    """Return the model with random LoRA on every linear map that has one of the usual names."""
    linear = {n.split(".")[-1] for n, m in oracle.named_modules() if type(m) is torch.nn.Linear}
    targets = [target for target in _TARGETS if target in linear]
    config = peft.LoraConfig(r=rank, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(oracle, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(parameter.normal_(0, 0.05).bfloat16())
    return adapted


def _scores(model: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    found = []
    for prompt in prompts:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
        found.append(logprobs[range(len(prompt) - 1), prompt[1:]].numpy())
    return found
