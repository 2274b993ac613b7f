"""GPT-OSS against transformers, from unquantised and from MXFP4 checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file
from support.contracts.model_contract import OTHERS, PROMPT, Case, ModelContract, make_case, shaken
from support.drivers.model_driver import (
    TINY,
    TOLERANCE,
    Driver,
    fill_slots,
    old_keys,
    oracle_logits,
)
from support.oracles.merged_oracle import named_lora, num_weights, weight_by_path
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lora_jax.config import from_hf
from lora_jax.models import load
from lora_jax.ops.grouped_matmul import CodedWeight

HIDDEN, WIDTH, EXPERTS, WINDOW = 32, 96, 5, 4  # MXFP4 wants multiples of 32


def packed(layer: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return random blocks and scales of an experts' matrix, values of about 0.3."""
    d_out, d_in = (2 * WIDTH, HIDDEN) if name == "gate_up_proj" else (HIDDEN, WIDTH)
    rng = np.random.default_rng([layer, d_out])
    blocks = rng.integers(0, 256, (EXPERTS, d_out, d_in // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(122, 126, blocks.shape[:-1], dtype=np.uint8)


def make_gpt_oss() -> transformers.GptOssForCausalLM:
    """A layer that slides and one that does not; experts of values that MXFP4 can hold."""
    transformers.set_seed(0)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    }
    config = transformers.GptOssConfig(
        **TINY,
        head_dim=12,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        pad_token_id=0,
        rope_parameters=rope,
    )
    model = shaken(transformers.GptOssForCausalLM(config))
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            stored = (torch.from_numpy(a) for a in packed(number, name))
            weight = convert_moe_packed_tensors(*stored, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(weight)
    return model


def hub_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released models."""
    config["experts_per_token"] = config["num_experts_per_tok"]
    config["initial_context_length"] = 16
    del config["swiglu_alpha"]
    return old_keys(config)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp("gpt_oss"), make_gpt_oss(), dict, hub_config)


class TestGptOss(ModelContract):
    """Sinks, a window, biases, weights normalised over the best two of five experts."""


def quantised_copy(source: Path, target: Path) -> Path:
    """Write the checkpoint as the released ones: experts in blocks and scales, the rest bf16."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            at = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[at]
            tensors[f"{at}_blocks"], tensors[f"{at}_scales"] = packed(layer, name)
    floats = {n: t.astype(ml_dtypes.bfloat16) for n, t in tensors.items() if t.dtype == np.float32}
    save_file(tensors | floats, target / "model.safetensors")
    config = hub_config(json.loads((source / "config.json").read_text()))
    config["torch_dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def quantised(case: Case, tmp_path_factory) -> Path:
    tmp = tmp_path_factory.mktemp("quantised")
    return quantised_copy(case.folders["transformers"], tmp / "mxfp4")


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_mxfp4_checkpoint_gives_the_same_weights(case: Case, quantised: Path, dtype):
    """Values of MXFP4 are exact in bfloat16, so that every weight is the rounded original."""
    model, config = load(quantised, dtype=dtype, plain=True)
    assert config.quantization is not None
    assert config.quantization.format == "mxfp4"
    wanted = np.dtype(dtype or ml_dtypes.bfloat16)
    got, want = (jax.tree.leaves_with_path(nnx.state(m, nnx.Param)) for m in (model, case.model))
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, ours), (_, original) in zip(got, want, strict=True):
        name = jax.tree_util.keystr(path)
        always_wide = "router" in name or "sinks" in name
        assert ours.dtype == (np.float32 if always_wide else wanted), name
        rounded = np.asarray(original).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(ours).astype(np.float32), rounded, err_msg=name)


@pytest.mark.parametrize("dtype", [None, np.float32])
def test_mxfp4_experts_stay_packed(quantised: Path, dtype):
    """Gate and up are every second row; their codes stand for the same values."""
    coded, plain = (load(quantised, dtype=dtype, plain=p)[0].layers[1].mlp for p in (False, True))
    for name in ("gate_proj", "up_proj", "down_proj"):
        packed = getattr(coded.experts, name)[...]
        assert isinstance(packed, CodedWeight)
        want = np.asarray(getattr(plain.experts, name)[...])
        np.testing.assert_array_equal(np.asarray(packed.plain()), want)
    assert not isinstance(coded.router.weight[...], CodedWeight)


@pytest.mark.long
def test_mxfp4_checkpoint_in_bfloat16_is_near_the_oracle(case: Case, quantised: Path):
    """The median over tokens: rounding may give a single token other experts."""
    got = Driver(*load(quantised)).run([PROMPT])[0]
    error = np.abs(got - oracle_logits(case.oracle, PROMPT)).max(axis=-1)
    assert np.median(error) < 0.2  # of logits up to 6


def test_mxfp4_scales_alone_are_refused(quantised: Path, tmp_path):
    tensors = load_file(quantised / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((quantised / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        load(tmp_path)


@pytest.mark.parametrize("part", ["sinks", "window", "limit"])
def test_parts_that_tiny_models_may_miss_matter(case: Case, part: str):
    """The weights are such that a model without the part gives other logits."""
    want, model = oracle_logits(case.oracle, PROMPT), make_gpt_oss().eval()
    for layer in model.model.layers:
        if part == "sinks":
            layer.self_attn.sinks.data.fill_(-30.0)
        elif part == "limit":
            layer.mlp.experts.limit = 1e9
    if part == "window":
        model.config.sliding_window = 64
    assert np.abs(oracle_logits(model, PROMPT) - want).max() > 100 * TOLERANCE


def lora_shapes() -> dict[str, tuple[int, int]]:
    """(d_out, d_in) of every linear map of both layers, by the names that adapter files use."""
    shapes = {"lm_head": (64, HIDDEN)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        sizes = {"q_proj": 48, "k_proj": 24, "v_proj": 24}
        shapes |= {f"{at}.self_attn.{n}": (size, HIDDEN) for n, size in sizes.items()}
        shapes[f"{at}.self_attn.o_proj"] = (HIDDEN, 48)
        shapes[f"{at}.mlp.router"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            here = f"{at}.mlp.experts.{expert}"
            shapes |= {f"{here}.{n}": (WIDTH, HIDDEN) for n in ("gate_proj", "up_proj")}
            shapes[f"{here}.down_proj"] = (HIDDEN, WIDTH)
    return shapes


def weight_of(model: Any, path: str) -> torch.Tensor:
    """Return the view [d_out, d_in] of a parameter: gate's columns are even, up's odd."""
    found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", path)
    if found is None:
        return weight_by_path(model, path)
    experts, expert = model.get_submodule(found[1]), int(found[2])
    if found[3] == "down_proj":
        return experts.down_proj[expert].T
    return experts.gate_up_proj[expert, :, found[3] == "up_proj" :: 2].T


def test_adapter_file_equals_merged_oracle(case: Case, tmp_path):
    """Names of files and the way back to interleaved matrices, in a batch with the base."""
    catalogue = case.model.catalogue(case.config)
    assert catalogue.interleaved_gate_up
    lora = named_lora(lora_shapes())
    table = fill_slots(catalogue, [lora.read_back(tmp_path / "adapter", catalogue)])
    prompts, slots = [PROMPT, OTHERS[0]], [0, -1]
    got = case.driver.run(prompts, slots=slots, adapters=table, max_rank=lora.rank)
    want = oracle_logits(lora.merged_into(case.oracle, weight_of), PROMPT)
    np.testing.assert_allclose(got[0], want, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(got[1], case.driver.run([OTHERS[0]])[0])


def test_released_20b_has_its_size():
    """The config of the released model gives its 20.9 billion weights and its YaRN."""
    config = from_hf(
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "experts_per_token": 4,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "quantization_config": {"quant_method": "mxfp4"},
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "vocab_size": 201088,
        }
    )
    assert round(num_weights(config) / 1e6) == 20915
    assert config.sliding_windows == (128, None) * 12
    assert config.rope.magnitude == pytest.approx(0.1 * np.log(32) + 1)
