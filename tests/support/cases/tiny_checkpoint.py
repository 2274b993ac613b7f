"""Random checkpoints and adapters that load in milliseconds, written as the hub would have them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<x>")


@dataclasses.dataclass(frozen=True)
class TinyShape:
    """Sizes of a Llama- or (with experts) Mixtral-shaped model with a byte tokenizer."""

    vocab: int = 260  # 4 special tokens, then the 256 bytes
    hidden: int = 32
    width: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    max_positions: int = 128
    experts: int = 0
    top_k: int = 2

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """Module path inside a layer -> (d_out, d_in), as transformers 4 spells it."""
        kv = self.kv_heads * self.head_dim
        found = {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
        }
        wide, narrow = (self.width, self.hidden), (self.hidden, self.width)
        if not self.experts:
            return found | {"mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": narrow}
        found["block_sparse_moe.gate"] = (self.experts, self.hidden)
        for expert in range(self.experts):
            at = f"block_sparse_moe.experts.{expert}"
            found |= {f"{at}.w1": wide, f"{at}.w3": wide, f"{at}.w2": narrow}
        return found


def write_model(folder: Path, shape: TinyShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Write config, weights and tokenizer; return the tensors (float32)."""
    rng = np.random.default_rng(seed)

    def normal(*dims: int) -> np.ndarray:
        return (rng.standard_normal(dims) * 1.5 * dims[-1] ** -0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((shape.vocab, shape.hidden)).astype("f4"),
        "model.norm.weight": rng.uniform(0.5, 1.5, shape.hidden).astype("f4"),
        "lm_head.weight": 2 * normal(shape.vocab, shape.hidden),
    }
    for layer in range(shape.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"model.layers.{layer}.{norm}.weight"
            tensors[name] = rng.uniform(0.5, 1.5, shape.hidden).astype("f4")
        for path, dims in shape.linears().items():
            tensors[f"model.layers.{layer}.{path}.weight"] = normal(*dims)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    write_tokenizer(folder)
    return tensors


PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def write_tokenizer(
    folder: Path, special: tuple[str, ...] = SPECIAL, template: str = PLAIN_TEMPLATE
) -> None:
    """Write a tokenizer with one token per byte after the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: place for place, token in enumerate((*special, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_adapter(
    folder: Path, shape: TinyShape, rank: int, seed: int, strength: float = 1.0
) -> dict[str, np.ndarray]:
    """Write a PEFT LoRA on every linear map; return name of the weight -> delta (float32)."""
    rng = np.random.default_rng(seed)
    tensors, deltas = {}, {}
    for layer in range(shape.layers):
        for path, (d_out, d_in) in shape.linears().items():
            name = f"model.layers.{layer}.{path}"
            a = (rng.standard_normal((rank, d_in)) * d_in**-0.5).astype("f4")
            b = (rng.standard_normal((d_out, rank)) * strength * rank**-0.5).astype("f4")
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            deltas[f"{name}.weight"] = 2.0 * b @ a
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({path.split(".")[-1] for path in shape.linears()}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def _config(shape: TinyShape) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
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
    if shape.experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
        }
    return config


def forward(tensors: dict[str, np.ndarray], shape: TinyShape, ids: list[int]) -> np.ndarray:
    """Float64 logits [tokens, vocab] of the whole sequence, in plain numpy."""
    weights = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        h = _norm(x, weights[f"{at}.input_layernorm.weight"])
        x = x + _attention(weights, f"{at}.self_attn", shape, h)
        h = _norm(x, weights[f"{at}.post_attention_layernorm.weight"])
        x = x + (_moe(weights, at, shape, h) if shape.experts else _mlp(weights, f"{at}.mlp", h))
    return _norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def _silu(x):
    return x / (1 + np.exp(-x))


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _rotate(x):
    """Rotary embedding of [tokens, heads, dim], halves rotated against each other."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


def _attention(weights, at, shape, h):
    tokens, dim = h.shape[0], shape.head_dim
    q, k, v = (
        (h @ weights[f"{at}.{n}_proj.weight"].T).reshape(tokens, -1, dim) for n in ("q", "k", "v")
    )
    group = shape.heads // shape.kv_heads
    k, v = np.repeat(_rotate(k), group, 1), np.repeat(v, group, 1)
    scores = np.einsum("qhd,khd->hqk", _rotate(q), k) * dim**-0.5
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    out = np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(tokens, -1)
    return out @ weights[f"{at}.o_proj.weight"].T


def _mlp(weights, at, h, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (weights[f"{at}.{name}.weight"] for name in names)
    return (_silu(h @ gate.T) * (h @ up.T)) @ down.T


def _moe(weights, at, shape, h):
    router = h @ weights[f"{at}.block_sparse_moe.gate.weight"].T
    chosen = np.argsort(-router, axis=-1, kind="stable")[:, : shape.top_k]
    share = _softmax(np.take_along_axis(router, chosen, -1))
    out = np.zeros_like(h)
    for t in range(h.shape[0]):
        for expert, part in zip(chosen[t], share[t], strict=True):
            at_expert = f"{at}.block_sparse_moe.experts.{expert}"
            out[t] += part * _mlp(weights, at_expert, h[t : t + 1], ("w1", "w3", "w2"))[0]
    return out
