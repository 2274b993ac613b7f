"""Small tokenizers of every kind, written as the folders that models come in."""

import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "Once upon a time there was a little girl named Lily.",
    "She said: \"Stop! It's 12:30, isn't it?\"\n\tThe end.",
    "naïve café, Straße, Ελλάδα, 日本語のテキスト, 🎉🏳️‍🌈 done",
    "  two  spaces and\r\nnew lines\n\n",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def byte_level(folder: Path, **config) -> Path:
    """GPT-2 style BPE: 256 bytes, some merges, one special token, one added one that shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("a tool", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", **config})
    return folder


def byte_fallback(folder: Path, **config) -> Path:
    """Llama style: words that begin with a visible space, and bytes for all other characters."""
    vocab = {token: i for i, token in enumerate(SPECIAL.values())}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = []
    for char in "▁" + "".join(map(chr, range(33, 127))) + "é日本":
        vocab.setdefault(char, len(vocab))
    for left, right in [*map(tuple, ["▁t", "he", "▁a", "in", "▁▁"]), ("▁t", "he"), ("▁t", "o")]:
        merges.append((left, right))
        vocab.setdefault(left + right, len(vocab))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {**SPECIAL, **config})
    return folder


def sentencepiece_model(folder: Path, **config) -> Path:
    """tokenizer.model, trained on the spot, with two added tokens past its end."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    added = {
        "340": {"content": "<|im_end|>", "special": True},
        "341": {"content": "<tool>", "special": False},
    }
    write_json(
        folder / "tokenizer_config.json", {**SPECIAL, "added_tokens_decoder": added, **config}
    )
    return folder


def gpt2_files(folder: Path, **config) -> Path:
    """vocab.json and merges.txt instead of a tokenizer.json."""
    data = json.loads((byte_level(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").unlink()
    write_json(folder / "vocab.json", data["model"]["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in data["model"]["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", **config})
    return folder


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "sentencepiece": sentencepiece_model,
    "gpt2": gpt2_files,
}
