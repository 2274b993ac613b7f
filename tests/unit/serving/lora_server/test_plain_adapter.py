"""Adapters of isolation `server`: plain LoRA is read, and what is more is refused by name."""

import json
import shutil

import pytest
from support.processes.server_process import ROOT

from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving.lora_server.plain_adapter import read_plain

MODEL = ROOT / "assets" / "tiny-moe"
CONFIG = read_config(MODEL)
CATALOGUE = model_class(CONFIG.model_type).catalogue(CONFIG)


def read(folder, max_rank=16):
    return read_plain("mine", str(folder), str(MODEL), CONFIG, CATALOGUE, max_rank)


def test_a_plain_adapter_is_read_within_the_largest_rank():
    assert read(MODEL / "adapters" / "law").sites
    with pytest.raises(ValueError, match="rank"):
        read(MODEL / "adapters" / "law", max_rank=4)
    with pytest.raises(FileNotFoundError):
        read(MODEL / "adapters" / "nobody")


@pytest.mark.parametrize(
    ("folder", "has"),
    [("heads/intent", "has a task head"), ("esft/token-law", "is no plain LoRA adapter")],
)
def test_heads_and_esft_are_refused_with_what_helps(folder, has):
    with pytest.raises(ValueError, match=f"^mine {has}: .*use isolation 'process'") as raised:
        read(MODEL / folder)
    assert "max_lora" not in str(raised.value)  # no room that this engine could be given


@pytest.mark.parametrize(
    ("key", "value", "has"),
    [
        ("use_dora", True, "has DoRA or trained biases"),
        ("bias", "all", "has DoRA or trained biases"),
        ("trainable_token_indices", [1, 2], "has trained tokens or modules of its own"),
        ("modules_to_save", ["lm_head"], "has trained tokens or modules of its own"),
    ],
)
def test_what_an_adapter_brings_is_told_before_its_tensors_are_read(tmp_path, key, value, has):
    folder = shutil.copytree(MODEL / "adapters" / "law", tmp_path / "law")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=f"^mine {has}: .*use isolation 'process'"):
        read(folder)
