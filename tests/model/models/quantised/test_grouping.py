"""Quantised checkpoints of every format: values bit for bit, codes kept, all or nothing."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support.cases.quantised_checkpoints import LLAMA, MOE, maps_of, one_map, write_pair
from support.oracles.quantised_files import FORMATS, store

from lora_jax.config import from_hf
from lora_jax.models import load
from lora_jax.models.checkpoint import SINGLE, Checkpoint, CheckpointTensor
from lora_jax.models.quantised import forms, with_quantised
from lora_jax.ops.grouped_matmul import QUANTISED, CodedWeight, ScaledWeight
from lora_jax.sharding import Split, make_mesh


def parameters(model: nnx.Module) -> dict:
    flat = nnx.to_flat_state(nnx.split(model, graph=False)[1])
    return {".".join(map(str, path)): param[...] for path, param in flat}


def plain(value) -> np.ndarray:
    made = value.plain() if isinstance(value, QUANTISED) else value
    return np.asarray(made, np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_every_matrix_is_the_formats_own_dequantisation(tmp_path, name):
    """Whole, and any box of rows and columns, in float32 and rounded to bfloat16."""
    stored = store(name, (48, 192), np.random.default_rng(3))
    files, config = one_map(tmp_path, name, stored.tensors)
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        found = with_quantised(files, config, dtype)
        assert list(found.tensors) == ["a.b.weight"]
        want = stored.values.astype(dtype).astype(np.float32)
        for rows, columns in ((range(48), range(192)), (range(9, 48, 3), range(7, 130))):
            out = np.empty((len(rows), len(columns)), np.float32)
            found["a.b.weight"].read((rows, columns), out)
            chosen = want[rows.start : rows.stop : rows.step, columns.start : columns.stop]
            np.testing.assert_array_equal(out, chosen)


LIBRARIES = Path(__file__).parents[3] / "fixtures" / "quantised"


@pytest.mark.parametrize("name", sorted(folder.name for folder in LIBRARIES.iterdir()))
def test_what_a_library_wrote_has_the_librarys_own_values(name):
    """bitsandbytes, compressed-tensors and transformers: see make_quantised_fixtures.py."""
    folder, dtype = LIBRARIES / name, np.dtype(ml_dtypes.bfloat16)
    want = np.load(folder / "expected.npy").view(dtype)
    section = json.loads((folder / "section.json").read_text())
    config = from_hf(LLAMA | {"quantization_config": section}).quantization
    matrix = with_quantised(Checkpoint(folder), config, dtype)["a.b.weight"]
    assert matrix.shape == want.shape
    whole = tuple(range(n) for n in want.shape)
    got = np.empty(want.shape, dtype)
    matrix.read(whole, got)
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("name", FORMATS)
def test_a_part_is_read_without_the_others(tmp_path, monkeypatch, name):
    stored = store(name, (48, 192), np.random.default_rng(3))
    files, config = one_map(tmp_path, name, stored.tensors)
    matrix = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    seen, read = [], CheckpointTensor.read

    def recorded(self, index, out):
        seen.append(self.name)
        read(self, index, out)

    monkeypatch.setattr(CheckpointTensor, "read", recorded)
    used: list[str] = []
    for part, (shape, dtype) in matrix.form.parts((48, 192)).items():
        seen.clear()
        matrix.read_part(part, tuple(range(n) for n in shape), np.empty(shape, dtype))
        used += sorted(set(seen))
    assert len(set(used)) == len(used) > 0


@pytest.mark.parametrize("name", ["nf4", "fp8 block", "int4 zeros", "awq", "mxfp4"])
def test_a_box_of_a_part_and_many_chunks_are_those_of_the_whole(tmp_path, monkeypatch, name):
    stored = store(name, (48, 256), np.random.default_rng(3))
    files, config = one_map(tmp_path, name, stored.tensors)
    matrix = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    rows = range(5, 45, 3)
    for part, (shape, dtype) in matrix.form.parts((48, 256)).items():
        whole, columns = matrix.rows_of(part, range(48)), range(0, shape[1], 2)
        assert whole.dtype == dtype, part
        box = np.empty((len(rows), len(columns)), dtype)
        matrix.read_part(part, (rows, columns), box)
        np.testing.assert_array_equal(box, whole[5:45:3, ::2])
    monkeypatch.setattr(forms, "_CHUNK_WEIGHTS", 7 * 256)
    out = np.empty((48, 256), np.float32)
    matrix.read((range(48), range(256)), out)
    np.testing.assert_array_equal(out, stored.values)


def test_scales_of_16_bits_keep_their_size(tmp_path):
    for name, want in (("int4", ml_dtypes.bfloat16), ("mxfp4", ml_dtypes.bfloat16)):
        (tmp_path / name).mkdir()
        tensors = store(name, (16, 128), np.random.default_rng(3)).tensors
        files, config = one_map(tmp_path / name, name, tensors)
        matrix = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
        assert matrix.form.scales == want


SOME = ("nf4", "fp8 block", "int4", "gptq")  # of each kind of codes one; above are all formats


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.long) for n in FORMATS]
)
@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_a_model_keeps_codes_and_has_the_values_of_its_plain_copy(tmp_path, name, family):
    config = LLAMA if family == "llama" else MOE
    quantised, copy = write_pair(tmp_path, name, config)
    got, want = (parameters(load(folder)[0]) for folder in (quantised, copy))
    kept = {n for n, value in got.items() if isinstance(value, QUANTISED)}
    products = (
        ("q_proj.weight", "down_proj.weight") if family == "llama" else ("experts.down_proj",)
    )
    assert all(any(n.endswith(p) for n in kept) for p in products)
    assert not any("norm" in n or "embed" in n or "router" in n for n in kept)
    for n, value in got.items():
        np.testing.assert_array_equal(plain(value), np.asarray(want[n], np.float32), err_msg=n)
    wide = parameters(load(quantised, plain=True)[0])
    assert not any(isinstance(value, QUANTISED) for value in wide.values())
    assert all(np.array_equal(plain(wide[n]), plain(want[n])) for n in want)


def test_codes_take_the_bytes_of_the_format(tmp_path):
    quantised, _ = write_pair(tmp_path, "nf4", LLAMA)
    down = parameters(load(quantised)[0])["layers.0.mlp.down_proj.weight"]
    assert isinstance(down, CodedWeight)
    leaves = jax.tree.leaves(down)
    assert sum(leaf.nbytes for leaf in leaves) == 128 * 192 * 9 // 16  # 0.5625 a weight
    quantised, _ = write_pair(tmp_path / "8", "fp8 channel", LLAMA)
    down = parameters(load(quantised)[0])["layers.0.mlp.down_proj.weight"]
    assert isinstance(down, ScaledWeight)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(down)) == 128 * 192 + 128 * 4


LATER = ("fp8 block", "gptq")


@pytest.mark.parametrize(
    "name",
    ["nf4 nested", *(pytest.param(n, marks=pytest.mark.long) for n in ("int4 zeros", *LATER))],
)
@pytest.mark.parametrize("experts", ["ep", "tp"])
def test_each_device_is_given_its_own_slice(tmp_path, name, experts):
    quantised, _ = write_pair(tmp_path, name, MOE)
    splits = (None, Split(make_mesh(2), experts))
    want, got = (parameters(load(quantised, split=split)[0]) for split in splits)
    for n, value in got.items():
        here = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), value)
        rows = plain(want[n]).shape[0]  # a vocabulary is padded
        np.testing.assert_array_equal(plain(here)[:rows], plain(want[n]), err_msg=n)
    codes = jax.tree.leaves(got["layers.0.mlp.experts.gate_proj"])[0]
    shards = {shard.data.shape[:2] for shard in codes.addressable_shards}
    assert shards == {(4, 64) if experts == "ep" else (8, 32)}


def test_dtype_of_the_request_is_that_of_the_values(tmp_path):
    quantised, _ = write_pair(tmp_path, "nf4", LLAMA)
    weight = parameters(load(quantised, dtype="float32")[0])["layers.0.attn.q_proj.weight"]
    assert weight.dtype == jnp.float32
    assert (
        plain(weight).astype(ml_dtypes.bfloat16).astype(np.float32).tolist()
        != plain(weight).tolist()
    )


def rewritten(folder, tensors=None, **config):
    """Write tensors and changes of the config into a checkpoint folder."""
    if tensors is not None:
        save_file(tensors, folder / SINGLE)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))
    return folder


def test_bad_checkpoints_are_refused_by_name(tmp_path):
    quantised, copy = write_pair(tmp_path, "fp8 block", LLAMA)
    with pytest.raises(ValueError, match="names fp8, but no tensor is stored so"):
        load(rewritten(copy, quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ValueError, match=r"which needs a quantization_config of fp8 .*has none"):
        load(rewritten(quantised, quantization_config=None))
    quantised, _ = write_pair(tmp_path / "int4", "int4", LLAMA)
    extra = load_file(quantised / SINGLE) | {
        "model.layers.0.self_attn.k_scale": np.ones(1, np.float32)
    }
    with pytest.raises(ValueError, match=r"no place in the model: .*k_scale"):
        load(rewritten(quantised, extra))
    section = FORMATS["int4"].section | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    load(rewritten(quantised, extra, quantization_config=section))
    at = "model.layers.1.self_attn"
    names = (*(f"{at}.{n}_scale" for n in ("q", "v", "kv")), f"{at}.k_proj.k_scale")
    more = {name: np.ones(1, np.float32) for name in (*names, f"{at}.v_proj.output_scale")}
    load(rewritten(quantised, extra | more, quantization_config=section))
    wrong = extra | {f"{at}.o_proj.k_scale": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match=r"no place in the model: .*o_proj\.k_scale\.$"):
        load(rewritten(quantised, wrong, quantization_config=section))


def test_biases_of_zeros_that_gptq_writes_have_no_place(tmp_path):
    quantised, _ = write_pair(tmp_path, "gptq", LLAMA)
    tensors = load_file(quantised / SINGLE)
    name = "model.layers.0.mlp.up_proj.bias"
    load(rewritten(quantised, tensors | {name: np.zeros(192, np.float16)}))
    with pytest.raises(ValueError, match=f"no place in the model: {name}"):
        load(rewritten(quantised, tensors | {name: np.full(192, 0.5, np.float16)}))
    norm = "model.layers.0.input_layernorm.bias"
    with pytest.raises(ValueError, match=f"no place in the model: {norm}"):
        load(rewritten(quantised, tensors | {norm: np.zeros(128, np.float16)}))
    biased = {f"model.layers.{n}.self_attn.{m}_proj" for n in range(2) for m in "qkvo"}
    biases = {f"{at}.bias": np.zeros(maps_of(LLAMA)[at][0], np.float16) for at in biased}
    model, _ = load(rewritten(quantised, tensors | biases, attention_bias=True))
    assert "layers.1.attn.v_proj.bias" in parameters(model)


@pytest.mark.parametrize("other", ["nf4", "fp8 block", "int4", "gptq"])
def test_a_map_of_another_format_is_refused_by_name(tmp_path, other):
    base = "nf4" if other != "nf4" else "int4"
    rng = np.random.default_rng(0)
    tensors = {f"a.b.{part}": t for part, t in store(base, (16, 128), rng).tensors.items()}
    tensors |= {f"c.d.{part}": t for part, t in store(other, (16, 128), rng).tensors.items()}
    save_file(tensors, tmp_path / SINGLE)
    config = from_hf(LLAMA | {"quantization_config": FORMATS[base].section}).quantization
    match = rf"c\.d\..* which needs a quantization_config of .*; config\.json has .* \({base}\)"
    with pytest.raises(ValueError, match=match):
        with_quantised(Checkpoint(tmp_path), config, np.dtype(np.float32))


def test_mixed_formats_are_refused_by_name(tmp_path):
    quantised, copy = write_pair(tmp_path, "int4", MOE)
    tensors = load_file(quantised / SINGLE)
    name = "model.layers.1.mlp.experts.2.up_proj"
    half = {n: t for n, t in tensors.items() if not n.startswith(f"{name}.weight_")}
    half[f"{name}.weight"] = load_file(copy / SINGLE)[f"{name}.weight"]
    with pytest.raises(ValueError, match=r"experts\.\{expert\}\.up_proj.*several formats"):
        load(rewritten(quantised, half))
    both = tensors | {f"{name}.weight": half[f"{name}.weight"]}
    with pytest.raises(ValueError, match=r"Stored in 16 bits and quantised: .*up_proj"):
        load(rewritten(quantised, both))
