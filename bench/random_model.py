"""Write random checkpoints and adapters of a given shape: real files, real loaders, no download."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-shaped model; the default has about 110 million parameters."""

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    max_positions: int = 1024

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """Module path inside a layer -> (d_out, d_in)."""
        hidden, kv = self.hidden_size, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (self.intermediate_size, hidden),
            "mlp.up_proj": (self.intermediate_size, hidden),
            "mlp.down_proj": (hidden, self.intermediate_size),
        }


def write_llama(folder: Path, shape: LlamaShape) -> int:
    """Write config, float32 weights and a tokenizer of made-up words; return the parameters."""
    rng = np.random.default_rng(0)

    def normal(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims, dtype=np.float32) * np.float32(dims[-1] ** -0.5)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal(
            (shape.vocab_size, shape.hidden_size), dtype=np.float32
        ),
        "model.norm.weight": np.ones(shape.hidden_size, np.float32),
        "lm_head.weight": normal(shape.vocab_size, shape.hidden_size),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = np.ones(shape.hidden_size, np.float32)
        for name, (d_out, d_in) in shape.linears().items():
            tensors[f"{prefix}{name}.weight"] = normal(d_out, d_in)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(llama_config(shape), indent=1))
    words = {f"w{i}": i for i in range(shape.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return sum(t.size for t in tensors.values())


def llama_config(shape: LlamaShape) -> dict[str, object]:
    """Return what config.json says of the shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_adapter(
    folder: Path, shape: LlamaShape, rank: int, seed: int, only: Collection[str] = ()
) -> int:
    """Write a PEFT LoRA on every linear map of every layer; return its bytes.

    With `only` it is on the maps of these names alone.
    """
    rng = np.random.default_rng(0)
    maps = {n: d for n, d in shape.linears().items() if not only or n.split(".")[-1] in only}
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (d_out, d_in) in maps.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            a = rng.standard_normal((rank, d_in), dtype=np.float32) * d_in**-0.5
            b = rng.standard_normal((d_out, rank), dtype=np.float32) * (0.3 * rank**-0.5)
            tensors[f"{path}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = b.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random-llama",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.split(".")[-1] for name in maps}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return sum(t.nbytes for t in tensors.values())
