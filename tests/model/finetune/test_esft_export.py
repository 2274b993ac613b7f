"""A folder in ESFT's form, and a checkpoint in which its experts stand for the base's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases.finetune_cases import make_folder

from lora_jax.finetune.esft_export import merge_checkpoint, save_esft
from lora_jax.finetune.esft_params import chosen_experts
from lora_jax.models import load

SELECTION = {0: (3, 1), 1: (2,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def params(folder):
    own = chosen_experts(load(folder, dtype="float32")[0], SELECTION)
    return jax.tree.map(lambda x: x + jnp.float32(0.1), own)


def test_the_folder_holds_the_chosen_experts_in_bfloat16(params, tmp_path):
    save_esft(tmp_path, params, SELECTION)
    assert {p.name for p in tmp_path.iterdir()} == {"expert_cfg.json", "model.safetensors"}
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 9
    for layer, experts in SELECTION.items():
        for place, expert in enumerate(experts):
            for name in ("gate_proj", "up_proj", "down_proj"):
                got = tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"]
                want = np.asarray(getattr(params[layer], name)[place])
                np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))
    assert tensors["model.layers.1.mlp.experts.2.down_proj.weight"].shape == (32, 20)


def test_the_merged_checkpoint_has_them_and_all_else_of_the_base(folder, params, tmp_path):
    save_esft(tmp_path / "adapter", params, SELECTION)
    merge_checkpoint(folder, tmp_path / "adapter", tmp_path / "merged")
    files = {p.name for p in folder.iterdir()}
    assert {p.name for p in (tmp_path / "merged").iterdir()} == files
    base, new, ours = (
        load_file(p / "model.safetensors")
        for p in (folder, tmp_path / "merged", tmp_path / "adapter")
    )
    assert set(new) == set(base)
    for name, value in new.items():
        np.testing.assert_array_equal(value, ours.get(name, base[name]), err_msg=name)
        assert value.dtype == base[name].dtype


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("mlp.experts.", "block_sparse_moe.experts."), "tiny has no tensors .*block_sparse_moe"),
        (("layers.1", "layers.7"), r"layers\.7.*3 in all"),
    ],
)
def test_an_adapter_of_another_base_is_not_merged(folder, params, tmp_path, change, message):
    save_esft(tmp_path / "adapter", params, SELECTION)
    file = tmp_path / "adapter" / "model.safetensors"
    save_file({k.replace(*change): v for k, v in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=message):
        merge_checkpoint(folder, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_size_is_not_merged(folder, params, tmp_path):
    save_esft(tmp_path / "adapter", params, SELECTION)
    file = tmp_path / "adapter" / "model.safetensors"
    save_file({k: np.ascontiguousarray(v[:-1]) for k, v in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"is \(\d+, \d+\), the base's"):
        merge_checkpoint(folder, tmp_path / "adapter", tmp_path / "merged")
