"""A base that is frozen in 4 bits: its adapter, what is kept of it, and what is said of it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.finetune_cases import RECORDS, WIDE_CONFIG, dense, make_folder

from lora_jax.adapters.catalogue import UNQUANTISED
from lora_jax.adapters.formats import peft_format
from lora_jax.finetune import lora
from lora_jax.finetune.attention import product
from lora_jax.finetune.frozen_base import load_base
from lora_jax.finetune.records import write_jsonl
from lora_jax.models import load
from lora_jax.ops.grouped_matmul import QUANTISED, CodedWeight
from lora_jax.quantize import quantize


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0, config=WIDE_CONFIG)


def test_the_base_is_that_of_the_quantised_files(folder, tmp_path):
    model, config, name = load_base(folder, "nf4", tmp_path / "scratch")
    assert (name, config.quantization.format) == ("nf4", "nf4")
    assert not list((tmp_path / "scratch").iterdir())
    quantize(folder, "nf4", tmp_path / "nf4")
    want, _ = load(tmp_path / "nf4", dtype="float32", plain=True)
    experts, attention = model.layers[1].mlp.experts, model.layers[0].attn
    for got, plain in (
        (experts.down_proj[...], want.layers[1].mlp.experts.down_proj[...]),
        (attention.q_proj.weight[...], want.layers[0].attn.q_proj.weight[...]),
    ):
        assert isinstance(got, QUANTISED)
        np.testing.assert_array_equal(got.plain(), plain)
    text = tuple(jnp.asarray(a, jnp.int32) for a in ([[5, 9, 7, 3]], [[0, 1, 2, 3]], [[0] * 4]))
    np.testing.assert_allclose(dense(model, text).logits, dense(want, text).logits, atol=1e-4)
    assert load_base(tmp_path / "nf4", None, tmp_path)[2] == "nf4"
    assert load_base(folder, None, tmp_path)[2] == UNQUANTISED
    with pytest.raises(ValueError, match="nf4 is in nf4; --quantization int4 needs the original"):
        load_base(tmp_path / "nf4", "int4", tmp_path)


def test_no_plain_weight_is_kept_for_the_gradient():
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 256, (24, 32)), jnp.uint8)
    scales = jnp.asarray(rng.random((24, 2)), jnp.float32)
    table = tuple(float(v) for v in np.linspace(-1, 1, 16, dtype=np.float32))
    w = CodedWeight(codes, scales, None, table, jnp.dtype(jnp.float32))
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    y, back = jax.vjp(lambda x: product("ti,oi->to", x, w), x)
    np.testing.assert_allclose(y, x @ w.plain().T, atol=1e-5)
    np.testing.assert_allclose(back(y)[0], y @ w.plain(), atol=1e-4)
    assert w.shape not in [kept.shape for kept in jax.tree.leaves(back)]


@pytest.mark.long
def test_the_adapter_warns_over_another_precision(folder, tmp_path):
    write_jsonl(tmp_path / "data.jsonl", RECORDS)
    out = tmp_path / "adapter"
    lora.main(
        [
            *("--model", str(folder), "--data", str(tmp_path / "data.jsonl"), "--out", str(out)),
            *("--rank", "2", "--steps", "12", "--batch-rows", "2", "--length", "32"),
            *("--learning-rate", "0.02", "--quantization", "nf4", "--modules", "q_proj"),
        ]
    )
    lines = (tmp_path / "adapter.training/nf4/loss.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    catalogue = (model := load(folder)[0]).catalogue(model.config)

    def warnings(served: str | None) -> tuple[str, ...]:
        over = dataclasses.replace(catalogue, quantization=served)
        return peft_format.read(out, over).report.warnings

    assert warnings("nf4") == warnings(None) == ()
    for served, named in ((UNQUANTISED, "16 or 32 bits"), ("fp8", "fp8")):
        text = f"trained over a base in nf4, served over one in {named}: answers differ."
        assert warnings(served) == (text,)
