"""Turn a llama2.c model (format v0) and its tokenizer into a Llama checkpoint folder.

    python -m lora_jax.finetune.assets.convert_llama2c stories260K.bin tok512.bin OUT

The folder loads like any Llama checkpoint: config.json, model.safetensors in float32,
tokenizer.json (the same token ids and text as llama2.c's encoder and decoder), and a README that
says where the numbers come from. Needs numpy and safetensors only.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import struct
import sys
from collections.abc import Container

import numpy as np
from safetensors.numpy import save_file

UNK, BOS, EOS = 0, 1, 2
SPECIAL = {UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
FIRST_BYTE = 3  # ids 3..258 are the bytes 0x00..0xFF
ROPE_THETA = 10000.0
RMS_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Header:
    """The seven int32 at the start of a v0 file."""

    dim: int
    hidden_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int  # negative on file when the head is not tied to the embedding
    seq_len: int
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model(data: bytes) -> tuple[Header, dict[str, np.ndarray]]:
    """Return the header and every weight by its llama2.c name, stacked over layers, float32.

    Raises ValueError when the length of the file is not the one its header asks for.
    """
    if len(data) < 28:
        raise ValueError(
            f"a llama2.c file starts with 28 bytes of header, this one has {len(data)}"
        )
    dim, hidden, layers, heads, kv_heads, vocab, seq = struct.unpack("<7i", data[:28])
    header = Header(dim, hidden, layers, heads, kv_heads, abs(vocab), seq, tied=vocab > 0)
    flat = np.frombuffer(data, "<f4", offset=28)
    shapes = weight_shapes(header)
    want = sum(int(np.prod(shape)) for shape in shapes.values())
    if want != flat.size:
        raise ValueError(f"{header} asks for {want} floats, the file holds {flat.size}")
    weights, offset = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        weights[name] = flat[offset : offset + size].reshape(shape)
        offset += size
    return header, weights


def weight_shapes(h: Header) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a v0 file in the order in which they stand in it."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (h.vocab_size, h.dim),
        "att_norm": (h.num_layers, h.dim),
        "wq": (h.num_layers, h.dim, h.dim),
        "wk": (h.num_layers, h.kv_dim, h.dim),
        "wv": (h.num_layers, h.kv_dim, h.dim),
        "wo": (h.num_layers, h.dim, h.dim),
        "ffn_norm": (h.num_layers, h.dim),
        "w1": (h.num_layers, h.hidden_dim, h.dim),
        "w2": (h.num_layers, h.dim, h.hidden_dim),
        "w3": (h.num_layers, h.hidden_dim, h.dim),
        "final_norm": (h.dim,),
        "rope_cos": (h.seq_len, h.head_dim // 2),
        "rope_sin": (h.seq_len, h.head_dim // 2),
    }
    if not h.tied:
        shapes["head"] = (h.vocab_size, h.dim)
    return shapes


def half_split(w: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of a q or k projection from adjacent rotary pairs to half-split ones.

    llama2.c rotates (2i, 2i+1) of a head together, Llama checkpoints rotate (i, i + head_dim/2).
    """
    out, d_in = w.shape
    paired = w.reshape(out // head_dim, head_dim // 2, 2, d_in)
    return np.ascontiguousarray(paired.transpose(0, 2, 1, 3)).reshape(out, d_in)


def to_llama(header: Header, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors under the names and in the row order of a Llama checkpoint, float32."""
    tensors = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["final_norm"],
    }
    if not header.tied:
        tensors["lm_head.weight"] = weights["head"]
    for layer in range(header.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": weights["att_norm"][layer],
            f"{prefix}self_attn.q_proj.weight": half_split(weights["wq"][layer], header.head_dim),
            f"{prefix}self_attn.k_proj.weight": half_split(weights["wk"][layer], header.head_dim),
            f"{prefix}self_attn.v_proj.weight": weights["wv"][layer],
            f"{prefix}self_attn.o_proj.weight": weights["wo"][layer],
            f"{prefix}post_attention_layernorm.weight": weights["ffn_norm"][layer],
            f"{prefix}mlp.gate_proj.weight": weights["w1"][layer],
            f"{prefix}mlp.up_proj.weight": weights["w3"][layer],
            f"{prefix}mlp.down_proj.weight": weights["w2"][layer],
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def read_pieces(data: bytes) -> list[tuple[bytes, float]]:
    """Return (piece, score) of every token id of a llama2.c tokenizer file.

    Raises ValueError when a record runs past the end of the file.
    """
    pieces, offset = [], 4  # the first int32 is the length of the longest piece
    while offset < len(data):
        if offset + 8 > len(data):
            raise ValueError(f"token {len(pieces)} has no whole record at byte {offset}")
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        if length < 0 or offset + length > len(data):
            raise ValueError(f"token {len(pieces)} has length {length} at byte {offset}")
        pieces.append((data[offset : offset + length], score))
        offset += length
    return pieces


def tokenizer_json(pieces: list[tuple[bytes, float]]) -> dict:
    """Return a `tokenizers` BPE that encodes and decodes as llama2.c does.

    A space is put before the text, characters outside the vocabulary become bytes, and of all
    neighbours whose join is a piece the best scored one is merged first: so each way to cut a
    piece in two is a merge, in falling order of the piece's score.
    """
    names = [SPECIAL.get(i, piece.decode("utf-8")) for i, (piece, _) in enumerate(pieces)]
    vocab = {name: i for i, name in enumerate(names)}
    if len(vocab) != len(names):
        raise ValueError(f"{len(names)} tokens have only {len(vocab)} distinct pieces")
    learned = sorted(range(FIRST_BYTE + 256, len(pieces)), key=lambda i: -pieces[i][1])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special_token(i, name) for i, name in SPECIAL.items()],
        "normalizer": {"type": "Prepend", "prepend": " "},
        "pre_tokenizer": None,
        "post_processor": bos_first(),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIAL[UNK],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges_of([names[i] for i in learned], vocab),
        },
    }


def merges_of(names: list[str], vocab: Container[str]) -> list[list[str]]:
    """Return each way to cut these tokens into two of the vocabulary, in the tokens' order."""
    cuts = ((name[:k], name[k:]) for name in names for k in range(1, len(name)))
    return [[left, right] for left, right in cuts if left in vocab and right in vocab]


def special_token(token_id: int, content: str) -> dict:
    """Return an entry of added_tokens: matched as it stands, left out of decoded text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def bos_first() -> dict:
    """Return the post-processor that puts <s> before a text."""
    bos = {"SpecialToken": {"id": SPECIAL[BOS], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {
            SPECIAL[BOS]: {"id": SPECIAL[BOS], "ids": [BOS], "tokens": [SPECIAL[BOS]]}
        },
    }


def model_config(h: Header) -> dict:
    """Return config.json in the spelling of hub checkpoints."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": h.dim,
        "intermediate_size": h.hidden_dim,
        "num_hidden_layers": h.num_layers,
        "num_attention_heads": h.num_heads,
        "num_key_value_heads": h.num_kv_heads,
        "head_dim": h.head_dim,
        "vocab_size": h.vocab_size,
        "max_position_embeddings": h.seq_len,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": h.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def tokenizer_config(h: Header) -> dict:
    """Return what tokenizer_config.json says of this model."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "unk_token": SPECIAL[UNK],
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": h.seq_len,
    }


README = """\
# stories260K

This page says where the smallest test model comes from: a trained Llama of 260 thousand \
parameters that writes short
children's stories.

| part | value |
| --- | --- |
| shape | hidden {h.dim}, {h.num_layers} layers, {h.num_heads} heads ({h.num_kv_heads} of K and \
V), {h.vocab_size} tokens, {h.seq_len} positions |
| training | by Andrej Karpathy, on TinyStories; published with llama2.c (karpathy/tinyllamas, MIT \
licence) |
| end of a story | `<s>` or `</s>` |

This folder changes the format and no numbers. Rows of q_proj and k_proj are reordered from \
adjacent rotary pairs to
half-split ones. The tokenizer is written as `tokenizers` JSON. The greedy text from an empty \
prompt is the one published
in llama2.c's `doc/stories260K.md`.

```bash
python -m lora_jax.finetune.assets.convert_llama2c {model_name} {tokenizer_name} OUT
```

| file | SHA-256 |
| --- | --- |
| `{model_name}` | {model_sha} |
| `{tokenizer_name}` | {tokenizer_sha} |
"""


def convert(model_path: pathlib.Path, tokenizer_path: pathlib.Path, out: pathlib.Path) -> None:
    """Write the checkpoint folder. ValueError if the two files do not belong together."""
    model_bytes, tokenizer_bytes = model_path.read_bytes(), tokenizer_path.read_bytes()
    header, weights = read_model(model_bytes)
    pieces = read_pieces(tokenizer_bytes)
    if len(pieces) != header.vocab_size:
        raise ValueError(f"model has {header.vocab_size} tokens, tokenizer has {len(pieces)}")
    out.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt"}
    save_file(to_llama(header, weights), out / "model.safetensors", metadata=metadata)
    write_json(out / "config.json", model_config(header))
    write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [BOS, EOS]})
    write_json(out / "tokenizer_config.json", tokenizer_config(header))
    write_json(out / "tokenizer.json", tokenizer_json(pieces))
    readme = README.format(
        h=header,
        model_name=model_path.name,
        tokenizer_name=tokenizer_path.name,
        model_sha=hashlib.sha256(model_bytes).hexdigest(),
        tokenizer_sha=hashlib.sha256(tokenizer_bytes).hexdigest(),
    )
    (out / "README.md").write_text(readme, encoding="utf-8")


def write_json(path: pathlib.Path, value: dict) -> None:
    """Write a JSON file, indented and in UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    """Convert the model that the command line names."""
    parser = argparse.ArgumentParser(prog="convert_llama2c", description=convert.__doc__)
    parser.add_argument("model", type=pathlib.Path, help="llama2.c model, format v0")
    parser.add_argument("tokenizer", type=pathlib.Path, help="llama2.c tokenizer")
    parser.add_argument("out", type=pathlib.Path, help="folder to write")
    args = parser.parse_args(argv)
    convert(args.model, args.tokenizer, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
