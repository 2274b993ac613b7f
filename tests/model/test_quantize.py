"""python -m lora_jax.quantize: folders that load, what stays in 16 bits, and what is refused."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases.quantised_checkpoints import LLAMA, MOE, maps_of, plain_tensors

from lora_jax.models import load
from lora_jax.models.checkpoint import INDEX, SINGLE, Checkpoint
from lora_jax.models.loader import read_config
from lora_jax.models.quantised import with_quantised
from lora_jax.models.quantised.forms import BFLOAT16
from lora_jax.models.sources import Stack, Tensor
from lora_jax.models.weight_sizes import weight_sizes
from lora_jax.ops.grouped_matmul import QUANTISED, matmul
from lora_jax.quantize import _names_apart, main, quantize


@pytest.fixture
def original(tmp_path):
    """A checkpoint in bfloat16, of two files, whose experts' down maps have 96 columns."""
    rng, config = np.random.default_rng(0), MOE | {"moe_intermediate_size": 96}
    tensors = plain_tensors(config, rng)
    for name, shape in maps_of(config).items():
        values = rng.standard_normal(shape) / shape[1] ** 0.5
        tensors[f"{name}.weight"] = values.astype(tensors["lm_head.weight"].dtype)
    folder = tmp_path / "original"
    (folder / "adapters").mkdir(parents=True)
    names = sorted(tensors)
    placed = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file)
        placed |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["nf4", "fp8", "int4"])
def test_a_copy_loads_and_is_near_the_original(original, tmp_path, name):
    out = tmp_path / "out"
    main([str(original), "--format", name, "--out", str(out)])
    assert sorted(p.name for p in out.iterdir()) == sorted(
        p.name for p in original.iterdir() if p.is_file()
    )
    files = list(out.glob("*.safetensors"))
    assert {f.stat().st_mode & 0o777 for f in files} == {0o644}
    index = json.loads((out / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(f.stat().st_size for f in files)
    model, _ = load(out)
    want, _ = load(original)
    block, plain = model.layers[1].mlp, want.layers[1].mlp
    sizes = weight_sizes(model)
    assert sizes.quantised_bytes < 0.57 * sizes.quantised_parameters * (2 if name == "fp8" else 1)
    assert isinstance(block.experts.gate_proj[...], QUANTISED)
    assert isinstance(block.experts.down_proj[...], QUANTISED) == (name != "nf4")
    np.testing.assert_array_equal(block.router.weight[...], plain.router.weight[...])
    got = np.asarray(block.experts.gate_proj[...].plain(), np.float32)
    original_values = np.asarray(plain.experts.gate_proj[...], np.float32)
    error = np.sqrt(np.mean((got - original_values) ** 2) / np.mean(original_values**2))
    assert error < 0.1
    assert read_config(out).original == "original"
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = next(v for k, v in section.items() if k.startswith(("llm_int8_skip", "modules", "ign")))
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(kept)
    assert ("model.layers.0.mlp.experts.3.down_proj" in kept) == (name == "nf4")


@pytest.mark.parametrize("name", ["nf4", "fp8", "int4"])
def test_a_quantised_head_gives_the_logits_of_the_values_it_stands_for(original, tmp_path, name):
    out = tmp_path / "out"
    main([str(original), "--format", name, "--out", str(out), "--quant-lm-head"])
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    kept = next(v for k, v in section.items() if k.startswith(("llm_int8_skip", "modules", "ign")))
    assert "model.layers.0.mlp.gate" in kept
    assert "lm_head" not in kept
    model, _ = load(out)
    coded = model.lm_head.weight[...]
    assert isinstance(coded, QUANTISED)
    hidden = np.random.default_rng(1).standard_normal((8, coded.shape[1]))
    rows = jnp.asarray(hidden, coded.dtype), jnp.int32(3)
    got, want = matmul(rows[0], coded, rows[1]), matmul(rows[0], coded.plain(), rows[1])
    assert np.abs(np.asarray(got[:3], np.float32)).max() > 0
    np.testing.assert_array_equal(got, want)
    whole = np.asarray(load(original)[0].lm_head.weight[...], np.float32)
    error = np.asarray(coded.plain(), np.float32) - whole
    assert 0 < np.sqrt(np.mean(error**2) / np.mean(whole**2)) < 0.1


def test_the_log_says_what_is_quantised_and_who_does_not_read_it(original, tmp_path, caplog):
    caplog.set_level("INFO")
    quantize(original, "nf4", tmp_path / "nf4")
    first, second, third = (record.message for record in caplog.records)
    assert first == "40 maps are in nf4."
    assert re.fullmatch(
        r"16 maps stay .* (\S+down_proj.weight, ){3}.*", second.replace(" and", ",")
    )
    assert second.endswith(" and 13 more.")
    assert third == "transformers 5 reads no experts in NF4; int4 and fp8 it reads."


def test_a_head_that_cannot_be_quantised_is_refused(original, tmp_path):
    config = json.loads((original / "config.json").read_text())
    (original / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(original / "a.safetensors") | load_file(original / "b.safetensors")
    del tensors["lm_head.weight"]
    tied = original.with_name("tied")
    shutil.copytree(original, tied, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, tied / SINGLE)
    assert (
        "lm_head" in quantize(tied, "int4", tmp_path / "kept")["ignore"]
    )  # transformers makes one
    with pytest.raises(ValueError, match=r"no head of its own .* Leave out --quant-lm-head"):
        quantize(original, "int4", tmp_path / "out", quant_lm_head=True)
    (original / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        file = next(f for f in original.glob("*.safetensors") if name in load_file(f))
        rows = np.zeros((200, 128), tensors["model.norm.weight"].dtype)
        save_file(load_file(file) | {name: rows}, file)
    with pytest.raises(
        ValueError, match=r"head of original is \(200, 128\), and fp8 needs columns"
    ):
        quantize(original, "fp8", tmp_path / "out", quant_lm_head=True)


@pytest.mark.long
def test_transformers_reads_the_values_of_fp8(tmp_path):
    """Also of maps that are no whole blocks, which stay in 16 bits: it would divide them evenly."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = LLAMA | {"hidden_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    config["num_attention_heads"] = 8
    rng = np.random.default_rng(0)
    tensors = plain_tensors(config, rng)
    for name, shape in maps_of(config).items():
        values = rng.standard_normal(shape) / shape[1] ** 0.5
        tensors[f"{name}.weight"] = values.astype(tensors["lm_head.weight"].dtype)
    folder, out = tmp_path / "original", tmp_path / "fp8"
    folder.mkdir()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    quantize(folder, "fp8", out)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        dtype=torch.bfloat16,
        device_map="cpu",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    files = with_quantised(Checkpoint(out), read_config(out).quantization, BFLOAT16)
    kept = 0
    for name, tensor in read.state_dict().items():
        want = np.empty(files[name].shape, np.float32)
        files[name].read(tuple(range(n) for n in want.shape), want)
        np.testing.assert_array_equal(tensor.float().numpy(), want, err_msg=name)
        kept += np.array_equal(want, tensors[name].astype(np.float32)) and name.removesuffix(
            ".weight"
        ) in maps_of(config)
    assert kept == 3  # gate, up and down, of 192 rows or columns


def test_refused_by_name(original, tmp_path, capsys):
    quantize(original, "int4", tmp_path / "int4")
    with pytest.raises(ValueError, match=r"int4 is quantised already \(compressed-tensors\)"):
        quantize(tmp_path / "int4", "nf4", tmp_path / "again")
    with pytest.raises(ValueError, match="original holds files; give a folder that does not exist"):
        quantize(original, "int4", original)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; give a folder that does not exist"):
        quantize(original, "int4", tmp_path / "file")
    with pytest.raises(SystemExit):
        main([str(original), "--format", "nf4", "--out", str(tmp_path / "file" / "x")])
    assert "Not a directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "absent"), "--format", "nf4", "--out", str(tmp_path / "x")])
    assert "There is no folder" in capsys.readouterr().err


def test_weights_that_cannot_be_encoded_are_refused_by_name(original, tmp_path):
    tensors = load_file(original / "a.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][0, 0] = np.inf
    save_file(tensors, original / "a.safetensors")
    with pytest.raises(ValueError, match=f"{name} holds values that are not finite"):
        quantize(original, "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_of_narrow_maps_is_refused(tmp_path):
    config = MOE | {"hidden_size": 96, "moe_intermediate_size": 96}
    config |= {"num_attention_heads": 3, "num_key_value_heads": 1}
    tensors = plain_tensors(config, np.random.default_rng(0))
    for name, shape in maps_of(config).items():
        tensors[f"{name}.weight"] = np.zeros(shape, np.float32)
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="in nf4, which needs columns in multiples of 64"):
        quantize(tmp_path, "nf4", tmp_path / "out")


@pytest.mark.parametrize("name", ["nf4", "int4"])
def test_fused_experts_are_written_apart(original, tmp_path, name):
    """The copy is that of a checkpoint with a tensor for each expert, in every bit."""
    folder = tmp_path / "fused"
    folder.mkdir()
    tensors = load_file(original / "a.safetensors") | load_file(original / "b.safetensors")
    for layer in range(MOE["num_hidden_layers"]):
        at = f"model.layers.{layer}.mlp.experts"
        for map_ in ("gate_proj", "up_proj", "down_proj"):
            parts = [tensors.pop(f"{at}.{e}.{map_}.weight") for e in range(8)]
            tensors[f"{at}.{map_}"] = np.stack(parts)
        gate, up = (tensors.pop(f"{at}.{map_}_proj") for map_ in ("gate", "up"))
        tensors[f"{at}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
    save_file(tensors, folder / SINGLE)
    shutil.copy(original / "config.json", folder)
    kept = [quantize(source, name, tmp_path / source.name[0]) for source in (original, folder)]
    assert kept[0] == kept[1]
    want, got = (Checkpoint(tmp_path / source.name[0]) for source in (original, folder))
    assert got.tensors.keys() == want.tensors.keys()
    for n, tensor in got.tensors.items():
        np.testing.assert_array_equal(tensor.whole(), want[n].whole(), err_msg=n, strict=True)


def test_experts_that_no_library_reads_quantised_are_refused_by_name():
    gate = Stack("model.layers.0.block_sparse_moe.experts.{expert}.w1.weight", 8)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj holds several experts or maps"):
        _names_apart("model.layers.0.mlp.experts.gate_up_proj", [gate, Tensor("x")])
