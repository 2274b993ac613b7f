"""llama.cpp (the xllamacpp wheel) on the weights of bench.random_model, in this process.

The files are GGUF with a made-up vocabulary. Heads of q and k are not brought into llama.cpp's
order: with random weights that changes tokens, not time.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from bench.random_model import LlamaShape

FORMATS = ("float32", "bfloat16", "q8_0", "q4_0", "q4_0-head")
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # kinds of tokens


def write_gguf(model: Path, shape: LlamaShape, kind: str, path: Path) -> None:
    """Write a model of write_llama as a GGUF of one of FORMATS.

    Of q4_0 the head is q8_0, of q4_0-head it is q4_0 too.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    types = gguf.GGMLQuantizationType
    asked = {"float32": types.F32, "bfloat16": types.BF16, "q8_0": types.Q8_0}
    asked |= dict.fromkeys(("q4_0", "q4_0-head"), types.Q4_0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocab_size)
    _write_vocabulary(writer, shape.vocab_size)
    for name, weight in load_file(model / "model.safetensors").items():
        kept = weight.ndim == 1
        chosen = types.F32 if kept else asked[kind]
        if name == "lm_head.weight" and kind == "q4_0":
            chosen = types.Q8_0
        data = gguf.quants.quantize(np.ascontiguousarray(weight), chosen)
        writer.add_tensor(_name(name), data, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: Any, size: int) -> None:
    """Write tokens as a SentencePiece model has them: three of control, the bytes, words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256]
    tokens += [f"w{i}" for i in range(len(tokens), size)]
    kinds += [_NORMAL] * (size - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _name(name: str) -> str:
    """Return what llama.cpp calls a weight of a Llama checkpoint."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


class LlamaCpp:
    """A llama.cpp server without HTTP, for so many requests at once."""

    def __init__(self, path: Path, requests: int, tokens: int):
        """`tokens` bounds a prompt and its answer."""
        import xllamacpp  # pyright: ignore[reportMissingImports]

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = requests, requests * tokens
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        params.warmup, params.verbosity = False, -1
        self._server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], num_out: int) -> None:
        """Answer prompts of token ids, all at once, greedily, with num_out tokens each."""

        def one(prompt: list[int]) -> None:
            answer = self._server.handle_completions(
                {
                    "prompt": prompt,
                    "max_tokens": num_out,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                }
            )
            if (given := answer["usage"]["completion_tokens"]) != num_out:
                raise RuntimeError(f"llama.cpp gave {given} tokens, not {num_out}: {answer}")

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(one, prompts))
