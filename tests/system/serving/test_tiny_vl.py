"""The shipped vision model: base, an adapter and every head answer their examples."""

import json
import math

import numpy as np
import pytest
from PIL import Image
from support.processes.server_process import ROOT

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.task_head import with_head
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving import Engine, Sampling

MODEL = ROOT / "assets" / "tiny-vl"
TURN = "<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
EXAMPLES = json.loads((MODEL / "examples.json").read_text())
HEADS = {f"{path.name}-head": path for path in sorted((MODEL / "heads").iterdir())}
ADAPTERS = {path.name: path for path in sorted((MODEL / "adapters").iterdir())}
SMALL = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_esft_adapters": 0, "max_loras": 2}
SMALL |= {"structured_outputs": False, "max_model_len": 192, "kv_cache_memory_bytes": 1 << 22}


def example(name: str) -> tuple[str, list[np.ndarray]]:
    """Return prompt and images of a name's example; that of the base is ""."""
    files = EXAMPLES["images"][name]
    text = EXAMPLES["adapters"].get(name, EXAMPLES["prompt"])
    return TURN.format(IMAGE * len(files), text), [np.asarray(Image.open(MODEL / f)) for f in files]


def said(engine: Engine, name: str) -> str:
    """Return the words of an answer to an example."""
    prompt, images = example(name)
    asked = Sampling(max_tokens=24, temperature=0)
    (answer,) = engine.generate([prompt], name or None, asked, images=[images])
    return answer.outputs[0].text


def test_adapters_and_heads_fit_the_base():
    """Every file is read as the server reads it; no engine, which takes seconds to compile."""
    config = read_config(MODEL)
    catalogue = model_class(config.model_type).catalogue(config)
    catalogue = with_head(catalogue, config.hidden_size, labels=100)
    for path in (*ADAPTERS.values(), *HEADS.values()):
        weights = peft_format.read(path, catalogue)
        head = weights.report.head
        assert (head is not None) == (path.parent.name == "heads"), path.name
        assert not weights.report.warnings, path.name


@pytest.mark.long
def test_every_example_is_answered():
    adapters = {name: str(path) for name, path in {**ADAPTERS, **HEADS}.items()}
    sizes = SMALL | {"max_loras": 8, "max_num_seqs": 4}
    with Engine(str(MODEL), adapters, **sizes) as engine:
        assert set(EXAMPLES["adapters"]) >= set(adapters)
        assert said(engine, ""), "the base lists what it sees"
        for name in ADAPTERS:
            assert said(engine, name), name
        for name in HEADS:
            prompt, images = example(name)
            (answer,) = engine.classify([prompt], name, images=[images])
            head = answer.outputs
            assert len(head.probs) > 1
            assert math.isfinite(sum(head.probs)), name
            assert name != "boxes-head" or head.boxes is not None
