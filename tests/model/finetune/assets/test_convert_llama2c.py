"""The shipped stories260K is llama2.c's model: same numbers, same tokens, same text."""

import hashlib
import itertools
import json
import pathlib
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.drivers.model_driver import Driver
from tokenizers import Tokenizer

from lora_jax.finetune.assets import convert_llama2c as convert
from lora_jax.models import load

ROOT = pathlib.Path(__file__).parents[4]
ASSET = ROOT / "assets" / "stories260k"
GOLDEN = ROOT / "tests" / "golden" / "stories260k_greedy.txt"


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "max_position_embeddings")
# Tensors of a checkpoint by their names in llama2.c.
WHOLE = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
LAYERED = {
    "att_norm": "input_layernorm",
    **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"},
    "ffn_norm": "post_attention_layernorm",
    **{"w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"},
}


def llama2c_encode(text: str, pieces: list[bytes], scores: list[float]) -> list[int]:
    """run.c's encode(), BOS on: byte fallback, then best scored merge first, leftmost on ties."""
    ids_of = {piece: i for i, piece in enumerate(pieces)}
    ids = [1]
    if text:
        ids.append(ids_of[b" "])
    for char in text:
        raw = char.encode()
        ids += [ids_of[raw]] if raw in ids_of else [byte + 3 for byte in raw]
    while True:
        best = (-1e10, -1, -1)
        for i in range(len(ids) - 1):
            merged = ids_of.get(pieces[ids[i]] + pieces[ids[i + 1]])
            if merged is not None and scores[merged] > best[0]:
                best = (scores[merged], merged, i)
        if best[1] < 0:
            return ids
        ids[best[2] : best[2] + 2] = [best[1]]


def llama2c_decode(ids: list[int], pieces: list[bytes]) -> bytes:
    """run.c's decode() over a text: no space after BOS, `<0xNN>` is a byte."""
    out = b""
    for previous, token in itertools.pairwise(ids):
        piece = pieces[token]
        if previous == 1 and piece.startswith(b" "):
            piece = piece[1:]
        out += bytes([token - 3]) if 3 <= token < 259 else piece
    return out


def asset_pieces() -> tuple[list[bytes], list[float]]:
    """Pieces and scores as the source has them, rebuilt from the shipped tokenizer.json."""
    model = json.loads((ASSET / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    pieces = [name.encode() for name in model["vocab"]]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) - 259)]
    return pieces, scores


def tiny_model(seed: int, tied: bool) -> tuple[convert.Header, bytes]:
    header = convert.Header(8, 12, 2, 4, 2, 300, 16, tied)
    count = sum(int(np.prod(s)) for s in convert.weight_shapes(header).values())
    floats = np.random.default_rng(seed).standard_normal(count).astype("<f4")
    head = struct.pack("<7i", 8, 12, 2, 4, 2, 300 if tied else -300, 16)
    return header, head + floats.tobytes()


def test_every_float_of_the_file_is_placed():
    for tied in (True, False):
        check_floats(tied)


def check_floats(tied):
    header, data = tiny_model(3, tied)
    got_header, weights = convert.read_model(data)
    assert got_header == header
    flat = np.concatenate([w.ravel() for w in weights.values()])
    np.testing.assert_array_equal(flat, np.frombuffer(data, "<f4", offset=28))
    tensors = convert.to_llama(header, weights)
    assert ("lm_head.weight" in tensors) is (not tied)
    rope = 2 * header.seq_len * header.head_dim // 2
    assert sum(t.size for t in tensors.values()) == flat.size - rope


def test_half_split_gives_the_same_scores_as_rotating_adjacent_pairs():
    heads, head_dim, dim, position = 3, 8, 5, 7
    rng = np.random.default_rng(0)
    wq, wk = rng.standard_normal((2, heads * head_dim, dim))
    x, y = rng.standard_normal((2, dim))
    angle = position * convert.ROPE_THETA ** (-np.arange(0, head_dim, 2) / head_dim)
    turn = np.exp(1j * angle)

    def adjacent(w, v):
        pairs = (w @ v).reshape(heads, head_dim // 2, 2)
        return pairs[..., 0] + 1j * pairs[..., 1]

    def split(w, v):
        halves = (convert.half_split(w, head_dim) @ v).reshape(heads, 2, head_dim // 2)
        return halves[:, 0] + 1j * halves[:, 1]

    want = np.real(adjacent(wq, x) * turn * np.conj(adjacent(wk, y))).sum(-1)
    got = np.real(split(wq, x) * turn * np.conj(split(wk, y))).sum(-1)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:20], "28 bytes"),
        (lambda data: data[:-4], "floats"),
        (lambda data: data + b"\0\0\0\0", "floats"),
    ],
)
def test_a_damaged_model_is_refused(damage, message):
    with pytest.raises(ValueError, match=message):
        convert.read_model(damage(tiny_model(0, True)[1]))


def test_a_damaged_tokenizer_is_refused():
    for tail in (b"\0" * 5, struct.pack("<fi", 0.0, 9) + b"abc"):
        with pytest.raises(ValueError, match="token 0"):
            convert.read_pieces(struct.pack("<i", 3) + tail)
    same = [(b"<unk>", 0.0), (b"a", 0.0), (b"b", 0.0), (b"c", 0.0), (b"c", 0.0)]
    with pytest.raises(ValueError, match="5 tokens have only 4 distinct pieces"):
        convert.tokenizer_json(same)


def test_model_and_tokenizer_must_have_as_many_tokens(tmp_path):
    (tmp_path / "m").write_bytes(tiny_model(0, True)[1])
    (tmp_path / "t").write_bytes(struct.pack("<ifi", 1, 0.0, 1) + b"a")
    with pytest.raises(ValueError, match="300 tokens, tokenizer has 1"):
        convert.convert(tmp_path / "m", tmp_path / "t", tmp_path / "out")


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=("Cs",))))
def test_any_text_gives_the_tokens_of_llama2c(text):
    check_text(text)


WORDS = st.sampled_from(["the", "her", " he", "ent", "\n", "  ", "Lily", "é", "“", "out", "ked"])


@given(st.lists(WORDS | st.text("abcdehnrtuv .,", max_size=4)).map("".join))
def test_story_like_text_gives_the_tokens_of_llama2c(text):
    check_text(text)


def check_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    if any(special in text for special in convert.SPECIAL.values()):
        return
    pieces, scores = asset_pieces()
    ids = tokenizer.encode(text).ids
    assert ids == llama2c_encode(text, pieces, scores)
    assert tokenizer.decode(ids) == llama2c_decode(ids, pieces).decode() == text


def llama2c_model() -> bytes:
    """Return the llama2.c file of the shipped checkpoint; no one reads its rotary tables."""
    config = json.loads((ASSET / "config.json").read_text())
    sizes = [config[name] for name in SIZES]
    header = convert.Header(*sizes, tied=True)
    tensors = load_file(ASSET / "model.safetensors")
    weights = {name: tensors[of] for name, of in WHOLE.items()}
    for name, of in LAYERED.items():
        of_layers = [tensors[f"model.layers.{n}.{of}.weight"] for n in range(header.num_layers)]
        if name in ("wq", "wk"):  # from half-split rows back to adjacent ones
            split = (-1, 2, header.head_dim // 2, header.dim)
            of_layers = [w.reshape(split).transpose(0, 2, 1, 3) for w in of_layers]
        weights[name] = np.stack(of_layers)
    shapes = convert.weight_shapes(header)
    flat = [weights.get(name, np.zeros(shape)).astype("<f4") for name, shape in shapes.items()]
    return struct.pack("<7i", *sizes) + b"".join(w.tobytes() for w in flat)


def llama2c_tokenizer() -> bytes:
    """Return the llama2.c file of the shipped tokenizer."""
    pieces, scores = asset_pieces()
    pieces[1:3] = b"\n<s>\n", b"\n</s>\n"
    records = [struct.pack("<fi", s, len(p)) + p for s, p in zip(scores, pieces, strict=True)]
    return struct.pack("<i", max(map(len, pieces))) + b"".join(records)


def test_the_command_makes_the_shipped_folder(tmp_path):
    """Of files as llama2.c has them, but for the rotary tables: these are not converted."""
    model, tokenizer = llama2c_model(), llama2c_tokenizer()
    (tmp_path / "stories260K.bin").write_bytes(model)
    (tmp_path / "tok512.bin").write_bytes(tokenizer)
    out = tmp_path / "folder" / "out"
    convert.main([*(str(tmp_path / n) for n in ("stories260K.bin", "tok512.bin")), str(out)])
    made = {p.name: p.read_bytes() for p in out.iterdir()}
    want = {p.name: p.read_bytes() for p in ASSET.iterdir() if p.is_file()}
    said, published = made.pop("README.md").decode(), want.pop("README.md").decode()
    assert made == want
    hashes = [hashlib.sha256(data).hexdigest() for data in (model, tokenizer)]
    assert re.findall("[0-9a-f]{64}", said) == hashes
    assert hashes[1] in published  # the tokenizer's file is the published one to the bit
    assert said.replace(hashes[0], "") == re.sub("[0-9a-f]{64}", "", published, count=1)


def test_weights_are_finite_float32():
    for name, tensor in load_file(ASSET / "model.safetensors").items():
        assert tensor.dtype == np.float32, name
        assert np.isfinite(tensor).all(), name


@pytest.mark.long
def test_greedy_text_from_an_empty_prompt_is_the_published_one():
    tokenizer = Tokenizer.from_file(str(ASSET / "tokenizer.json"))
    prompt = tokenizer.encode("").ids
    assert prompt == [convert.BOS]
    model, config = load(ASSET)
    tokens = Driver(model, config, page_size=16).greedy(prompt, 256)
    assert convert.BOS not in tokens
    text = tokenizer.decode(prompt + tokens)
    assert text == GOLDEN.read_text(encoding="utf-8").rstrip("\n")
