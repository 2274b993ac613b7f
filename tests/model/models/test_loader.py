"""Loading: complete or not at all, in the dtype asked for, slice by slice, in little memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from lora_jax.models import load
from lora_jax.models.checkpoint import SINGLE, CheckpointTensor
from lora_jax.sharding import Split, make_mesh

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def mixtral_tensors(config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return every tensor of a Mixtral checkpoint, random."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    shapes["lm_head"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            shapes[f"{at}.self_attn.{name}_proj"] = (rows, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}"] = (hidden,)
        shapes[f"{at}.block_sparse_moe.gate"] = (config["num_local_experts"], hidden)
        for expert in range(config["num_local_experts"]):
            moe = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{moe}.w1": (width, hidden), f"{moe}.w3": (width, hidden)}
            shapes[f"{moe}.w2"] = (hidden, width)
    rng = np.random.default_rng(0)
    return {
        f"{name}.weight": rng.standard_normal(shape, np.float32).astype(dtype)
        for name, shape in shapes.items()
    }


def write(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.split(model, graph=False)[1])
    return {".".join(map(str, path)): param[...] for path, param in flat}


def test_every_parameter_is_the_checkpoints(tmp_path):
    tensors = mixtral_tensors(CONFIG)
    model, _ = load(write(tmp_path, tensors))
    found = parameters(model)
    for name, file in {
        "embed.weight": "model.embed_tokens",
        "layers.1.attn.k_proj.weight": "model.layers.1.self_attn.k_proj",
        "layers.0.post_norm.weight": "model.layers.0.post_attention_layernorm",
        "layers.1.mlp.router.weight": "model.layers.1.block_sparse_moe.gate",
    }.items():
        np.testing.assert_array_equal(found[name], tensors[f"{file}.weight"])
    for name, part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        for expert in range(4):
            file = f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"
            np.testing.assert_array_equal(
                found[f"layers.1.mlp.experts.{name}_proj"][expert], tensors[file]
            )


def test_missing_tensors_are_listed(tmp_path):
    tensors = mixtral_tensors(CONFIG)
    for name in ("lm_head.weight", "model.layers.1.block_sparse_moe.experts.3.w2.weight"):
        del tensors[name]
    with pytest.raises(
        ValueError, match=r"lacks lm_head\.weight, model\.layers\.1.*experts\.3\.w2"
    ):
        load(write(tmp_path, tensors))


def test_leftovers_are_listed(tmp_path):
    tensors = mixtral_tensors(CONFIG)
    tensors["model.layers.2.input_layernorm.weight"] = np.ones(32, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(32, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    with pytest.raises(
        ValueError, match=r"no place.*: model\.layers\.0.*q_proj\.bias, model\.layers\.2"
    ):
        load(write(tmp_path, tensors))


def test_shapes_must_be_the_configs(tmp_path):
    folder = write(tmp_path, mixtral_tensors(CONFIG), num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"k_proj\.weight gives \(16, 32\).* is \(32, 32\)"):
        load(folder)


def test_weights_must_be_floats(tmp_path):
    tensors = mixtral_tensors(CONFIG)
    for name, kind in (("lm_head.weight", np.int32), ("model.norm.weight", np.uint8)):
        tensors[name] = tensors[name].astype(kind)
    match = r"lm_head\.weight holds int32, not floats; model\.norm\.weight holds uint8, not floats"
    with pytest.raises(ValueError, match=match):
        load(write(tmp_path, tensors))


def test_experts_that_are_more_than_the_config_says(tmp_path):
    folder = write(tmp_path, mixtral_tensors(CONFIG), num_local_experts=3)
    with pytest.raises(ValueError, match=r"gate\.weight gives \(4, 32\).*is \(3, 32\)"):
        load(folder)


def test_a_tied_head_is_not_stored_or_is_the_embedding(tmp_path):
    tensors = mixtral_tensors(CONFIG)
    head = tensors.pop("lm_head.weight")
    model, config = load(write(tmp_path, tensors, tie_word_embeddings=True))
    assert model.lm_head is None
    assert config.tie_embeddings
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    load(write(tmp_path, tensors, tie_word_embeddings=True))
    tensors["lm_head.weight"] = head
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load(write(tmp_path, tensors, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("stored", "said", "asked", "want"),
    [
        (np.float16, "float16", None, jnp.float32),
        (np.float16, None, None, jnp.float32),
        (ml_dtypes.bfloat16, "bfloat16", None, jnp.bfloat16),
        (ml_dtypes.bfloat16, None, None, jnp.bfloat16),
        (np.float32, None, None, jnp.float32),
        (ml_dtypes.bfloat16, "bfloat16", "float32", jnp.float32),
        (np.float32, "float32", "bfloat16", jnp.bfloat16),
    ],
)
def test_dtype(tmp_path, stored, said, asked, want):
    tensors = mixtral_tensors(CONFIG, stored)
    model, _ = load(write(tmp_path, tensors, torch_dtype=said), dtype=asked)
    found = parameters(model)
    router = found.pop("layers.0.mlp.router.weight")
    assert router.dtype == jnp.float32  # whatever the rest is
    weight = found["layers.0.attn.q_proj.weight"]
    assert weight.dtype == want
    file = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(weight, file.astype(jnp.dtype(want)))


def test_dtype_that_no_op_computes(tmp_path):
    with pytest.raises(ValueError, match="float16 is not supported, only float32 and bfloat16"):
        load(write(tmp_path, mixtral_tensors(CONFIG)), dtype="float16")


def test_no_config(tmp_path):
    save_file(mixtral_tensors(CONFIG), tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "mixtral"}')
    with pytest.raises(ValueError, match=r"config\.json of .*: the key 'model_type' stands twice"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"no folder meta-llama/Llama-3; models are folders"):
        load("meta-llama/Llama-3")


def test_a_split_model_has_no_memory_of_its_own(tmp_path):
    folder, split = write(tmp_path, mixtral_tensors(CONFIG)), Split(make_mesh(2), "tp")
    with pytest.raises(ValueError, match="those of one device, without split"):
        load(folder, split=split, place=lambda *_: None)


def test_a_stored_head_beside_tied_embeddings_has_to_be_the_same(tmp_path):
    tensors = mixtral_tensors(CONFIG)
    write(tmp_path, tensors, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"set, yet lm_head.weight differs from model.embed"):
        load(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    load(write(tmp_path, tensors, tie_word_embeddings=True))


@pytest.mark.parametrize(("devices", "experts"), [(2, "tp"), (4, "ep"), (2, "ep")])
def test_each_device_is_given_its_own_slice(tmp_path, monkeypatch, devices, experts):
    """Equal values, a fraction of the bytes per device, and each byte read once per holder."""
    folder = write(tmp_path, mixtral_tensors(CONFIG))
    want = parameters(load(folder)[0])
    read: list[int] = []
    fill = CheckpointTensor._fill

    def counting(self, file, buffer):
        if "experts" in self.name:
            read.append(buffer.nbytes)
        fill(self, file, buffer)

    monkeypatch.setattr(CheckpointTensor, "_fill", counting)
    split = Split(make_mesh(devices), experts)
    found = parameters(load(folder, split=split)[0])
    for name, array in found.items():
        rows = len(want[name])  # a vocabulary has rows of zeros up to a multiple
        np.testing.assert_array_equal(np.asarray(array)[:rows], want[name])
        assert not np.asarray(array)[rows:].any()
    assert found["embed.weight"].shape[0] % split.vocab_multiple == 0
    gate = found["layers.0.mlp.experts.gate_proj"]
    assert len(gate.addressable_shards) == devices
    assert {shard.data.size for shard in gate.addressable_shards} == {gate.size // devices}
    stored = sum(array.nbytes for name, array in found.items() if ".experts." in name)
    assert sum(read) == stored  # split by rows, no byte is read twice


MEMORY_SCRIPT = """
import re, sys
from lora_jax.models import load
from lora_jax.sharding import Split, make_mesh

split = Split(make_mesh(2), sys.argv[3]) if sys.argv[3] else None

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

load(sys.argv[1], split=split)  # what the first load of all takes: kernels, caches
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
model, _ = load(sys.argv[2], split=split)
print(before, status("VmHWM"), status("VmRSS"))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's counters")
@pytest.mark.parametrize(
    "experts", ["", *(pytest.param(name, marks=pytest.mark.long) for name in ("ep", "tp"))]
)
def test_peak_memory_is_the_model_and_its_largest_tensor(tmp_path, experts):
    """On one device, and on two that have whole experts or parts of all."""
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    write(small, mixtral_tensors(CONFIG))
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8000}
    sizes |= {"num_local_experts": 8, "num_hidden_layers": 4}
    config = CONFIG | sizes
    tensors = mixtral_tensors(config, ml_dtypes.bfloat16)
    write(large, tensors, **sizes)
    model_bytes = sum(tensor.nbytes for tensor in tensors.values())
    largest = 8 * 1024 * 512 * 2  # one matrix of all experts
    assert model_bytes > 120e6
    del tensors
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(small), str(large), experts]
    flags = os.environ.get("XLA_FLAGS", "")
    if experts:
        flags = f"{flags} --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags.strip()}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    before, peak, after = map(int, done.stdout.split())
    assert after - before > 0.9 * model_bytes  # the counters do see the model
    assert peak - before <= model_bytes + largest + 16e6, (peak - before, model_bytes)
