"""PEFT folders of every layout and version: the deltas they stand for, and what is refused."""

import hashlib
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import adapter_cases as cases

from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.formats import peft_format
from lora_jax.config import from_hf
from lora_jax.models.registry import model_class


def found_deltas(folder: str, catalogue) -> dict[str, np.ndarray]:
    """Return what the reader made of a fixture, under the names of expected.npz."""
    weights = peft_format.read(cases.FIXTURES / folder, catalogue)
    return {
        f"{name}@{layer}": cases.site_delta(site) for (name, layer), site in weights.sites.items()
    }


def expected_deltas(folder: str, catalogue) -> dict[str, np.ndarray]:
    """Return expected.npz by site: PEFT's own deltas, cut apart by hand where sites are fused."""
    with np.load(cases.FIXTURES / folder / "expected.npz") as stored:
        parts: dict[str, np.ndarray] = {}
        for name, delta in stored.items():
            _cut(name.removesuffix(".weight").split("."), delta, catalogue, parts)
    return parts


def _cut(path, delta, catalogue, parts):
    layer = next((int(part) for part in path if part.isdigit()), 0)
    leaf = path[-1]
    if "experts" in path:
        return _cut_experts(path[path.index("experts") + 1 :], layer, delta, catalogue, parts)
    if leaf == "kv_b_proj":
        heads = delta.reshape(cases.HEADS, cases.NOPE + cases.V_DIM, cases.LATENT)
        parts[f"kv_b_proj.k@{layer}"] = heads[:, : cases.NOPE].transpose(0, 2, 1)
        parts[f"kv_b_proj.v@{layer}"] = heads[:, cases.NOPE :]
    elif leaf == "Wqkv":
        for name, part in zip("qkv", np.split(delta, [16, 24]), strict=True):
            parts[f"{name}_proj@{layer}"] = part[None]
    else:
        names = {"gate": "router", "router": "router", "layer": "router", "out_proj": "o_proj"}
        prefix = "shared_experts." if "shared_experts" in path else ""
        parts[f"{prefix}{names.get(leaf, leaf)}@{layer}"] = delta[None]
    return None


def _cut_experts(rest, layer, delta, catalogue, parts):
    short = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    if rest[-1] not in ("gate_up_proj", "down_proj") or len(rest) == 2:
        name = f"experts.{short.get(rest[-1], rest[-1])}@{layer}"
        if len(rest) == 1:
            parts[name] = delta
        else:
            old = parts.get(name, np.zeros((3, *delta.shape), np.float32))
            old[int(rest[0])] = delta
            parts[name] = old
        return
    if catalogue.interleaved_gate_up:
        delta = delta.transpose(0, 2, 1)  # GPT-OSS keeps [E, in, out]
    if rest[-1] == "down_proj":
        parts[f"experts.down_proj@{layer}"] = delta
        return
    half = delta.shape[1] // 2
    way = catalogue.interleaved_gate_up
    gate, up = (delta[:, ::2], delta[:, 1::2]) if way else (delta[:, :half], delta[:, half:])
    parts[f"experts.gate_proj@{layer}"], parts[f"experts.up_proj@{layer}"] = gate, up


@pytest.mark.parametrize("folder", cases.FOLDERS)
def test_every_layout_gives_the_deltas_of_its_writer(folder):
    catalogue = cases.catalogue_of(folder)
    want, got = expected_deltas(folder, catalogue), found_deltas(folder, catalogue)
    assert want.keys() == got.keys()
    for name in want:
        assert np.abs(want[name]).max() > 1e-3
        full = np.broadcast_to(got[name], want[name].shape)
        np.testing.assert_allclose(full, want[name], atol=1e-6, rtol=1e-5, err_msg=name)


TINY = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
HF_CONFIGS = {
    "llama": {},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 12, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 3, "head_dim": 8, "sliding_window": 8},
    "deepseek_v2": {
        **{"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 26},
        **{"moe_intermediate_size": 12, "n_routed_experts": 3, "n_shared_experts": 2},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 10, "v_head_dim": 6},
        **{"qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "topk_method": "greedy"},
    },
    "dbrx": {
        **{"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 32, "vocab_size": 20},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 3, "moe_top_k": 2},
    },
}


@pytest.mark.parametrize("folder", cases.FOLDERS)
def test_the_real_models_place_the_same_matrices(folder):
    """The catalogues of lora_jax.models lead to the same sites as the ones written down here."""
    _, kind, variant = folder.split("-", 2)
    sizes = {"mixtral": {"hidden_size": 24}, "gpt_oss": {"intermediate_size": 16}}
    config = {"model_type": kind, **({} if kind == "dbrx" else TINY), **HF_CONFIGS[kind]}
    config |= sizes[kind] if variant == "square" else {}
    real = model_class(kind).catalogue(from_hf(config))
    want = peft_format.read(cases.FIXTURES / folder, cases.catalogue_of(folder)).sites
    got = peft_format.read(cases.FIXTURES / folder, real).sites
    assert got.keys() == want.keys()
    for key in want:
        np.testing.assert_array_equal(cases.site_delta(got[key]), cases.site_delta(want[key]))
        module = real.modules[key[0]]
        assert got[key].a.shape[2] == module.d_in
        assert got[key].b.shape[2] == module.d_out


def test_reader_keeps_what_is_shared_as_one_matrix():
    fused = peft_format.read(cases.FIXTURES / "0.21.2-mixtral-both", cases.moe()).sites
    assert fused["experts.gate_proj", 0].a is fused["experts.up_proj", 0].a
    qkv = peft_format.read(cases.FIXTURES / "0.21.2-dbrx-attention", cases.dbrx()).sites
    assert qkv["q_proj", 0].a is qkv["k_proj", 0].a is qkv["v_proj", 0].a
    mla = peft_format.read(
        cases.FIXTURES / "0.21.2-deepseek_v2-everything", cases.deepseek_v2()
    ).sites
    assert mla["kv_b_proj.k", 1].b is mla["kv_b_proj.v", 1].a
    outer = peft_format.read(cases.FIXTURES / "hand-mixtral-shared_outer", cases.moe()).sites
    assert outer["experts.gate_proj", 0].a.shape[0] == outer["experts.down_proj", 0].b.shape[0] == 1


def test_half_precision_files_keep_their_dtype():
    bf16 = peft_format.read(cases.FIXTURES / "0.18.1-llama-head", cases.llama())
    f16 = peft_format.read(cases.FIXTURES / "0.19.0-llama-head", cases.llama())
    assert bf16.sites["q_proj", 0].a.dtype == ml_dtypes.bfloat16
    assert f16.sites["q_proj", 0].a.dtype == np.float16


Q = "model.layers.0.self_attn.q_proj"
ONES = np.ones((2, 16), np.float32)


def but(name: str, tensor: np.ndarray | None, names=("q_proj",)) -> dict[str, np.ndarray]:
    """Return good tensors with one replaced, added or (None) taken out."""
    tensors = cases.dense_tensors(names) | {name: tensor}
    return {n: t for n, t in tensors.items() if t is not None}


TENSOR_REFUSALS = {
    "no_b": (but(f"{Q}.lora_B.weight", None), rf"{Q}\.lora_A\.weight is without its lora_B"),
    "no_a": (but(f"{Q}.lora_A.weight", None), rf"{Q}\.lora_B\.weight is without its lora_A"),
    "extra": (but("model.norm.weight", ONES), r"model\.norm\.weight is not a LoRA matrix"),
    "many_extra": (
        cases.dense_tensors() | {f"model.x{i}": ONES for i in range(9)},
        r"model\.x0, .* and 3 more are not",
    ),
    "default_infix": (but(f"{Q}.lora_A.default.weight", ONES), "lora_A.default.weight is not a"),
    "dora": (but(f"{Q}.lora_magnitude_vector", ONES), "lora_magnitude_vector: DoRA"),
    "lora_bias": (but(f"{Q}.lora_B.bias", ONES), r"lora_B\.bias: a bias"),
    "embedding": (
        but("model.embed_tokens.lora_embedding_A", ONES),
        r"embed_tokens\.lora_embedding_A: LoRA on an embedding",
    ),
    "tokens": (
        but("model.embed_tokens.token_adapter.trainable_tokens_delta", ONES),
        "trainable_tokens_delta: trained embedding rows",
    ),
    "resized": (but("model.embed_tokens.weight", ONES), r"embed_tokens\.weight: a whole embedding"),
    "head_to_save": (but("lm_head.weight", ONES), r"lm_head\.weight: a whole embedding or head"),
    "stray_copy_alone": (
        but("lm_head.base_layer.weight", ONES),
        "lm_head.base_layer.weight is not",
    ),
    "twice": (but(f"{Q}.lora_A", ONES), "stands twice"),
    "a_shape": (
        but(f"{Q}.lora_A.weight", np.ones((2, 17), np.float32)),
        rf"{Q}\.lora_A\.weight has shape \(2, 17\); the base model wants \(rank, 16\)",
    ),
    "b_shape": (
        but(f"{Q}.lora_B.weight", np.ones((15, 2), np.float32)),
        rf"{Q}\.lora_B\.weight has shape \(15, 2\); the base model wants \(16, 2\)",
    ),
    "three_dimensional": (
        but(f"{Q}.lora_A.weight", np.ones((1, 2, 16), np.float32)),
        r"shape \(1, 2, 16\); the base model wants \(rank, 16\)",
    ),
    "other_rank": (cases.dense_tensors(rank=3), "lora_A.weight has rank 3, the config says 2"),
    "layer": (cases.dense_tensors(layer=7), "has no q_proj in layer 7"),
    "unknown_module": (
        {
            "model.layers.0.mamba.in_proj.lora_A.weight": ONES,
            "model.layers.0.mamba.in_proj.lora_B.weight": ONES,
        },
        r"\(llama\) has no module model\.layers\.0\.mamba\.in_proj",
    ),
    "refused_by_rule": (
        {"model.embed_tokens.lora_A.weight": ONES, "model.embed_tokens.lora_B.weight": ONES.T},
        "adapters on the embedding are not supported",
    ),
    "nan": (
        but(f"{Q}.lora_A.weight", ONES * np.nan),
        rf"{Q}\.lora_A\.weight has values that",
    ),
    "inf": (
        but(f"{Q}.lora_A.weight", ONES * np.inf),
        rf"{Q}\.lora_A\.weight has values that",
    ),
    "float64": (but(f"{Q}.lora_A.weight", ONES.astype(np.float64)), "lora_A.weight has dtype F64"),
    "empty": ({}, "no LoRA matrices"),
}


@pytest.mark.parametrize("case", TENSOR_REFUSALS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, case):
    tensors, message = TENSOR_REFUSALS[case]
    cases.write_adapter(tmp_path / "a", tensors)
    with pytest.raises(ValueError, match=f"adapter_model.safetensors: .*{message}") as caught:
        peft_format.read(tmp_path / "a", cases.llama())
    assert str(tmp_path) not in str(caught.value)


def test_copy_of_the_head_is_skipped_only_beside_lora_on_it(tmp_path):
    weights = peft_format.read(cases.FIXTURES / "0.21.2-llama-head", cases.llama())
    assert ("lm_head", 0) in weights.sites
    assert weights.report.num_tensors == 2 * len(weights.sites) + 1


def test_rank_above_the_limit_is_refused(tmp_path):
    cases.write_adapter(tmp_path / "a", cases.dense_tensors(rank=9), {"r": 9})
    limits = peft_format.PeftReadLimits(max_rank=8)
    with pytest.raises(ValueError, match=r"rank 9 of q_proj in layer 0 .* limit of 8"):
        peft_format.read(tmp_path / "a", cases.llama(), limits=limits)


def test_file_above_the_limit_is_refused_unread(tmp_path):
    cases.write_adapter(tmp_path / "a", cases.dense_tensors())
    limits = peft_format.PeftReadLimits(max_file_bytes=100)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors has \d+ bytes, at most 100"):
        peft_format.read(tmp_path / "a", cases.llama(), limits=limits)


def test_pickles_and_other_files(tmp_path):
    folder = cases.write_adapter(tmp_path / "a", cases.dense_tensors())
    (folder / "optimizer.pt").write_bytes(b"x")  # a training folder is fine
    peft_format.read(folder, cases.llama())
    (folder / "extra.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"extra\.safetensors would be lost"):
        peft_format.read(folder, cases.llama())
    (folder / "extra.safetensors").unlink()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors\. adapter_model\.bin "):
        peft_format.read(folder, cases.llama())
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        peft_format.read(folder, cases.llama())
    with pytest.raises(FileNotFoundError, match=r"no folder '.*missing'"):
        peft_format.read(tmp_path / "missing", cases.llama())


def test_report_says_what_was_read(tmp_path):
    folder = cases.FIXTURES / "0.21.2-mixtral-patterns"
    report = peft_format.read(folder, cases.moe()).report
    as_json = json.loads(json.dumps(report.as_json()))
    assert as_json["folder"] == "0.21.2-mixtral-patterns"
    assert as_json["kind"] == "lora"
    assert as_json["peft_version"] == "0.21.2"
    assert as_json["max_rank"] == 3
    assert as_json["modules"]["v_proj"] == {"layers": [0], "ranks": [1], "scalings": [5.0]}
    assert as_json["modules"]["experts.down_proj"]["scalings"] == [3.5]
    assert set(as_json["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    stored = {name: (folder / name).read_bytes() for name in report.files}
    assert report.file_bytes == sum(map(len, stored.values()))
    assert report.files == {n: hashlib.sha256(data).hexdigest() for n, data in stored.items()}
    weights = peft_format.read(folder, cases.moe())
    assert report.weight_bytes == 4 * sum(w * n for w, n in weights.rows_by_width().items())


def test_digest_is_of_both_files(tmp_path):
    source = cases.FIXTURES / "0.21.2-mixtral-both"
    digest = peft_format.read(source, cases.moe()).digest
    shutil.copytree(source, tmp_path / "other_name")
    assert peft_format.read(tmp_path / "other_name", cases.moe()).digest == digest
    cases.change_config(source, tmp_path / "a", lora_alpha=7)
    assert peft_format.read(tmp_path / "a", cases.moe()).digest != digest


@pytest.mark.parametrize(
    ("named", "warns"),
    [
        (None, False),
        ("", False),
        ("org/tiny-llama", False),
        ("/home/somebody/tiny-llama/", False),
        ("org/other", True),
    ],
)
def test_another_base_model_is_a_warning(tmp_path, named, warns):
    config = {"base_model_name_or_path": named}
    cases.write_adapter(tmp_path / "a", cases.dense_tensors(), config)
    weights = peft_format.read(tmp_path / "a", cases.llama(), base_names=("models/tiny-llama",))
    assert ["'org/other'" in w for w in weights.report.warnings] == [True] * warns
    assert "/home" not in json.dumps(weights.report.as_json())
    wide = but(f"{Q}.lora_A.weight", np.ones((2, 17), np.float32))
    cases.write_adapter(tmp_path / "b", wide, config)
    with pytest.raises(ValueError, match=r"wants \(rank, 16\)") as refused:
        peft_format.read(tmp_path / "b", cases.llama(), base_names=("models/tiny-llama",))
    assert ("The adapter was made for the base model 'org/other'" in str(refused.value)) == warns


def test_the_whole_real_adapter_is_refused_for_its_head_and_read_without(real_data, tmp_path):
    source = real_data / "peft_configs" / "sift_opf_zh"
    catalogue = sift_catalogue(source)
    with pytest.raises(ValueError, match="modules_to_save"):
        peft_format.read(source, catalogue)
    bare = cases.change_config(source, tmp_path / "a", modules_to_save=None)
    with pytest.raises(ValueError, match=r"score\.bias, .*score\.weight are not"):
        peft_format.read(bare, catalogue)
    tensors = load_file(source / "adapter_model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".score." not in n}
    (bare / "adapter_model.safetensors").chmod(0o644)
    save_file(kept, bare / "adapter_model.safetensors")
    weights = peft_format.read(bare, catalogue)
    assert len(weights.sites) == 32
    for (name, layer), site in weights.sites.items():
        path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        np.testing.assert_array_equal(site.a[0], tensors[f"{path}.lora_A.weight"])
        np.testing.assert_array_equal(site.b[0], tensors[f"{path}.lora_B.weight"].T)
        assert site.scaling == 2.0


def sift_catalogue(source: Path) -> LoraCatalogue:
    """Return a catalogue with the sizes of the real adapter's own matrices."""
    tensors = load_file(source / "adapter_model.safetensors")
    modules, rules = {}, []
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        path = f"base_model.model.model.layers.0.self_attn.{name}"
        d_in = tensors[f"{path}.lora_A.weight"].shape[1]
        d_out = tensors[f"{path}.lora_B.weight"].shape[0]
        modules[name] = LoraModule(name, d_in, d_out, tuple(range(8)))
        rules.append(cases.rule(f"model.layers.{{l}}.self_attn.{name}", name))
    return LoraCatalogue("real", 8, modules, tuple(rules))
