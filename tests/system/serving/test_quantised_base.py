"""A quantised base served whole: its plain copy's tokens, with adapters, by Python and HTTP."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.processes.http_server import client_of
from support.processes.server_process import ROOT

from lora_jax.models.checkpoint import SINGLE, Checkpoint
from lora_jax.models.loader import read_config
from lora_jax.models.quantised import with_quantised
from lora_jax.quantize import quantize
from serving import Engine, Sampling
from serving.http.app import create_app
from serving.http.settings import HttpSettings

MODEL = ROOT / "assets/tiny-moe"
ADAPTERS = sorted(p.name for p in (MODEL / "adapters").iterdir() if p.is_dir())[:2]
PROMPTS: list[list[int]] = [[5, 9, 17, 33, 65, 129], [7] * 20, list(range(40, 90))]


def plain_copy(quantised: Path, out: Path) -> Path:
    """Write a checkpoint of the values that a quantised one stands for, in bfloat16."""
    out.mkdir()
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    config = read_config(quantised)
    files = with_quantised(Checkpoint(quantised), config.quantization, bfloat16)
    tensors = {}
    for name, tensor in files.tensors.items():
        tensors[name] = np.empty(tensor.shape, bfloat16)
        tensor.read(tuple(range(n) for n in tensor.shape), tensors[name])
    save_file(tensors, out / SINGLE)
    for file in quantised.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out / file.name)
    raw = json.loads((quantised / "config.json").read_text())
    del raw["quantization_config"]
    (out / "config.json").write_text(json.dumps(raw))
    return out


def engine_of(folder: Path, **changes) -> Engine:
    adapters = {name: str(MODEL / "adapters" / name) for name in ADAPTERS}
    sizes = {
        "structured_outputs": False,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
    }
    return Engine(str(folder), adapters=adapters, **({"max_esft_adapters": 0} | sizes | changes))


def tokens_of(engine: Engine) -> list:
    """Return greedy tokens of every prompt, on the base and on every adapter, in one batch."""
    asked = [(prompt, name) for prompt in PROMPTS for name in (None, *ADAPTERS)]
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts, adapters = zip(*asked, strict=True)
    outputs = engine.generate(list(prompts), list(adapters), sampling)
    return [list(output.outputs[0].token_ids) for output in outputs]


FORMATS = ["int4", *(pytest.param(name, marks=pytest.mark.long) for name in ("nf4", "fp8"))]


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_plain_copy(tmp_path, name):
    quantize(MODEL, name, tmp_path / "quantised")
    copy = plain_copy(tmp_path / "quantised", tmp_path / "plain")
    with engine_of(copy) as engine:
        want, plain_info = tokens_of(engine), engine.model_info
    with engine_of(tmp_path / "quantised") as engine:
        assert tokens_of(engine) == want
        info = engine.model_info
        with client_of(create_app(engine, HttpSettings())) as client:
            card = client.get(f"/v1/models/{info.name}").json()
            body = {"model": ADAPTERS[0], "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
            answer = client.post("/v1/completions", json=body | {"ignore_eos": True}).json()
    assert card["quantization"]["format"] == name
    assert card["quantization"]["parameters"] == info.quantization["parameters"] > 300_000
    assert info.num_parameters == plain_info.num_parameters
    assert info.weight_bytes < plain_info.weight_bytes
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_two_devices_give_the_tokens_of_one(tmp_path, name):
    quantize(MODEL, name, tmp_path)
    with engine_of(tmp_path) as engine:
        want = tokens_of(engine)
    with engine_of(tmp_path, tensor_parallel_size=2) as engine:
        assert tokens_of(engine) == want


def test_adapters_that_replace_experts_are_refused_by_name(tmp_path):
    quantize(MODEL, "int4", tmp_path / "quantised")
    with pytest.raises(ValueError, match=r"max_esft_adapters is 2, but the base's experts are qu"):
        engine_of(tmp_path / "quantised", max_esft_adapters=2)
