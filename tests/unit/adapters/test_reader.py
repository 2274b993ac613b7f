"""A folder's files say which kind of adapter it is."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.cases import tiny_esft

from lora_jax.adapters import reader
from lora_jax.adapters.gains import with_gains
from lora_jax.models import model_class
from lora_jax.models.loader import read_config


def test_the_kind_is_told_by_the_config_file(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    config = read_config(base)
    catalogue = model_class(config.model_type).catalogue(config)
    tiny_esft.write_esft_adapter(tmp_path / "esft", base, {0: (1,)}, 1)
    assert reader.read(tmp_path / "esft", catalogue).report.kind == "esft"
    (tmp_path / "esft" / "task_head.json").write_text("{}")
    with pytest.raises(ValueError, match=r"task_head\.json would be lost"):
        reader.read(tmp_path / "esft", catalogue)
    cases.write_adapter(tmp_path / "lora", cases.dense_tensors())
    assert reader.read(tmp_path / "lora", cases.llama()).report.kind == "lora"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        reader.read(tmp_path / "empty", catalogue)


def test_names_and_configs_are_checked_without_the_weights(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    tiny_esft.write_esft_adapter(tmp_path / "esft", base, {0: (1,)}, 1)
    cases.write_adapter(tmp_path / "lora", cases.dense_tensors())
    for kind in ("esft", "lora"):
        reader.check(tmp_path / kind)
        for file in (tmp_path / kind).glob("*.safetensors"):
            file.write_bytes(b"no weights")
        reader.check(tmp_path / kind)
    with pytest.raises(ValueError, match=r"rank 2 is above the limit of 1; max_lora_rank sets it"):
        reader.check(tmp_path / "lora", reader.AdapterReadLimits(max_rank=1))
    (tmp_path / "lora" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        reader.check(tmp_path / "lora")
    (tmp_path / "esft" / "expert_cfg.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expert_cfg\.json"):
        reader.check(tmp_path / "esft")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        reader.check(tmp_path / "empty")


def test_limits_and_root_reach_both_readers(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    config = read_config(base)
    catalogue = model_class(config.model_type).catalogue(config)
    root = tmp_path / "root"
    tiny_esft.write_esft_adapter(tmp_path / "esft", base, {0: (1,)}, 1)
    cases.write_adapter(root / "lora", cases.dense_tensors())
    with pytest.raises(ValueError, match="leads outside"):
        reader.read(tmp_path / "esft", catalogue, root=root)
    with pytest.raises(ValueError, match="at most"):
        reader.read(
            tmp_path / "esft", catalogue, limits=reader.AdapterReadLimits(max_file_bytes=64)
        )
    with pytest.raises(ValueError, match="limit of 1"):
        reader.read(
            root / "lora", cases.llama(), limits=reader.AdapterReadLimits(max_rank=1), root=root
        )


def test_outputs_of_closed_modules_are_refused_by_their_names(tmp_path):
    open_ = with_gains(cases.llama().only(["q_proj"]), ["q_proj", "k_proj"])
    assert open_.module_names == ("q_proj", "q_proj.gain")
    at = "model.layers.0.self_attn."
    tensors = {
        at + "q_proj.lora_A.weight": np.ones((2, 16), "f4"),
        at + "q_proj.lora_B.weight": np.ones((16, 2), "f4"),
    }
    trained = tensors | {at + "q_proj.bias": np.ones(16, "f4")}
    cases.write_adapter(tmp_path / "q", trained, {"r": 2, "bias": "all"})
    assert reader.read(tmp_path / "q", open_).gains.keys() == {("q_proj", 0)}
    trained = tensors | {at + "k_proj.bias": np.ones(8, "f4")}
    cases.write_adapter(tmp_path / "k", trained, {"r": 2, "bias": "all"})
    with pytest.raises(ValueError, match=r"changes k_proj, .*name k_proj in --lora-target-modules"):
        reader.read(tmp_path / "k", open_)
    tensors = {n.replace("q_proj", "k_proj"): t for n, t in tensors.items()}
    tensors[at + "k_proj.lora_B.weight"] = np.ones((8, 2), "f4")
    tensors[at + "k_proj.lora_magnitude_vector"] = np.ones(8, "f4")
    cases.write_adapter(tmp_path / "dora", tensors, {"r": 2, "use_dora": True})
    with pytest.raises(ValueError, match="the adapter changes k_proj"):
        reader.read(tmp_path / "dora", open_)


def misfits(tensors: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Return tensors of a LoRA adapter that do not fit its base, by what is wrong."""
    first = next(iter(tensors))
    wide = {name: np.pad(t, ((0, 0), (0, 1))) for name, t in tensors.items()}
    return {
        "shapes": wide,
        "module": {name.replace("layers.0", "layers.999"): t for name, t in tensors.items()},
        "pair": {name: t for name, t in tensors.items() if name != first},
        "dtype": tensors | {first: tensors[first].astype(np.int32)},
        "none": {},
    }


@pytest.mark.parametrize("wrong", misfits(cases.dense_tensors()))
def test_headers_alone_tell_what_a_load_refuses(tmp_path, wrong):
    catalogue, good = cases.llama(), cases.dense_tensors()
    cases.write_adapter(tmp_path / "good", good)
    reader.check_fits(tmp_path / "good", catalogue)
    file = tmp_path / "good" / "adapter_model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    file.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))  # values are not looked at
    reader.check_fits(tmp_path / "good", catalogue)
    cases.write_adapter(tmp_path / "bad", misfits(good)[wrong])
    with pytest.raises(ValueError, match=r"\S") as load:
        reader.read(tmp_path / "bad", catalogue)
    with pytest.raises(ValueError, match=r"\S") as early:
        reader.check_fits(tmp_path / "bad", catalogue)
    assert str(early.value) == str(load.value)


def test_of_a_file_whose_copies_would_take_much_memory_nothing_is_said(tmp_path, monkeypatch):
    cases.write_adapter(tmp_path / "bad", misfits(cases.dense_tensors())["shapes"])
    monkeypatch.setattr(reader.peft_format, "_MOST_BLANK", 100)
    reader.check_fits(tmp_path / "bad", cases.llama())
