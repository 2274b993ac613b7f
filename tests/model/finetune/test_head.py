"""A head learns labels of a small text, alone and above LoRA, and is served with its answers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cases.finetune_cases import RECORDS, fit_nothing, make_folder, trace_training
from support.processes.server_process import ROOT

from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune import head as trained
from lora_jax.finetune import lora
from lora_jax.finetune.labelled import Labelled, write_labelled
from lora_jax.finetune.records import write_jsonl
from serving import Engine

WORDS = ("one", "two", "three", "four")
TEXT = [Labelled(f"what is {a} and {b}", (b,)) for a in WORDS for b in WORDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0)


def test_losses_are_cross_entropies():
    logits = np.random.default_rng(0).normal(size=(3, 2)).astype("f4")
    wanted = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    weights = np.array([1, 1, 0], np.float32)

    def loss(kind):
        given = (jnp.asarray(logits), jnp.asarray(wanted), jnp.asarray(weights))
        return float(trained.head_loss(*given, kind))

    powers = np.exp(logits)
    chosen = -np.log((powers * wanted).sum(-1) / powers.sum(-1))
    assert loss(HeadKind.CLASS) == pytest.approx(chosen[:2].mean(), rel=1e-5)
    each = 1 / (1 + np.exp(-logits))
    right = -np.log(np.where(wanted > 0, each, 1 - each)).mean(-1)
    assert loss(HeadKind.MULTI_LABEL) == pytest.approx(right[:2].mean(), rel=1e-5)


def run(folder, tmp_path, rank, steps):
    """Train by the command; return the adapter's folder and the share of right answers."""
    write_labelled(tmp_path / "text.jsonl", TEXT, HeadKind.CLASS)
    text, out = str(tmp_path / "text.jsonl"), tmp_path / "adapter"
    flags = ["--head=class", "--model", str(folder), "--data", text, "--eval", text]
    flags += ["--out", str(out), "--rank", str(rank), "--steps", str(steps), "--length", "64"]
    trained.main([*flags, "--learning-rate", "3e-2"])
    told = json.loads((tmp_path / "adapter.training" / "heldout.json").read_text())
    assert told["examples"] == len(TEXT)
    return out, told["right"]


def served(folder, out, records):
    """Return the share of right answers of a server of the trained head."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "structured_outputs": False}
    with Engine(str(folder), {"x": out}, dtype="float32", max_esft_adapters=0, **sizes) as engine:
        messages = [[{"role": "user", "content": record.prompt}] for record in records]
        tokens = [engine.tokenizer.apply_chat_template(m) for m in messages]
        ids = [engine.tokenizer.encode(t, add_special_tokens=False) for t in tokens]
        answers = engine.classify(ids, "x")
    pairs = zip(answers, records, strict=True)
    return sum(answer.outputs.labels == record.labels for answer, record in pairs) / len(records)


def test_a_head_alone_is_trained_on_states(folder, tmp_path):
    _, share = run(folder, tmp_path, 0, 60)
    assert share >= 0.5, "the label is the last word"


@pytest.mark.long
def test_a_head_above_lora_learns_and_is_served(folder, tmp_path):
    out, share = run(folder, tmp_path, 2, 150)
    assert share >= 0.5, "four labels, so that chance is a quarter"
    assert served(folder, out, TEXT) == pytest.approx(share, abs=1e-4)


def test_a_head_above_lora_is_stored_with_it_and_a_head_for_an_adapter_beside_its_own(
    read_only_folder, tmp_path, monkeypatch
):
    """Training is traced only: the head says the first label, and LoRA adds nothing."""
    fits = trace_training(monkeypatch, trained)
    write_labelled(tmp_path / "text.jsonl", TEXT, HeadKind.CLASS)
    common = ["--head", "class", "--model", str(read_only_folder), "--length", "64"]
    common += ["--data", str(tmp_path / "text.jsonl"), "--steps", "30"]
    above = [*common, "--rank", "2", "--modules", "q_proj", "v_proj", "--dtype", "bfloat16"]
    trained.main([*above, "--out", str(tmp_path / "above")])
    (fit,) = fits
    assert fit.folder == tmp_path / "above.training"
    assert fit.text.weights.sum() == len(TEXT)  # one target of each record
    config = json.loads((tmp_path / "above" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert set(config["target_modules"]) == {"q_proj", "v_proj"}
    head = json.loads((tmp_path / "above" / "task_head.json").read_text())
    assert (head["kind"], head["labels"]) == ("class", sorted(WORDS))
    stored = load_file(tmp_path / "above" / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {"bfloat16"}

    fit_nothing(monkeypatch, lora)
    write_jsonl(tmp_path / "plain.jsonl", RECORDS)
    plain = ["--model", str(read_only_folder), "--data", str(tmp_path / "plain.jsonl")]
    lora.main([*plain, "--out", str(tmp_path / "plain"), "--rank", "2", "--modules", "q_proj"])
    again = [*common, "--adapter", str(tmp_path / "plain"), "--out", str(tmp_path / "beside")]
    trained.main([*again, "--eval", str(tmp_path / "text.jsonl")])
    assert fits[1].text.num_rows == len(TEXT)  # states, which stay as they are
    kept = load_file(tmp_path / "beside" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "plain" / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(kept[name], tensor)
    told = json.loads((tmp_path / "beside.training" / "heldout.json").read_text())
    first = [record.labels[0] for record in TEXT].count(min(WORDS))
    assert told == {"right": first / len(TEXT), "examples": len(TEXT)}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--head", "boxes"], "lora_jax.finetune.pictures.adapter"),
        (["--head", "sum"], "'sum' is not one of class, multi_label, count"),
        (["--head", "class", "--eval", "none.jsonl"], "there is no file none.jsonl"),
        (["--head", "class", "--adapter", "none"], "none is no folder with adapter_config.json"),
    ],
)
def test_flags_that_do_not_fit_are_refused(read_only_folder, capsys, flags, message):
    own = ["--model", str(read_only_folder), "--data", __file__, "--out", "OUT"]
    with pytest.raises(SystemExit):
        trained.main([*own, *flags])
    assert message in capsys.readouterr().err


# Written for this test; none is from the text that the shipped adapters learned.
SLOTS = ("北京", "上海", "周五", "明天", "后天", "深圳")
ASKED = {
    "weather": "{}会不会下雨",
    "music": "放一首关于{}的歌",
    "alarm": "{}早上叫我起床",
}


@pytest.mark.long
def test_a_head_for_the_shipped_adapter_is_served_beside_its_text(tmp_path):
    model = ROOT / "assets" / "tiny-moe"
    text = {
        name: [Labelled(form.format(slot), (label,)) for label, form in ASKED.items() for slot in s]
        for name, s in (("train", SLOTS[:4]), ("heldout", SLOTS[4:]))
    }
    for name, records in text.items():
        write_labelled(tmp_path / f"{name}.jsonl", records, HeadKind.CLASS)
    flags = ["--head", "class", "--model", str(model), "--out", str(tmp_path / "made")]
    flags += ["--adapter", str(model / "adapters" / "intent"), "--steps", "200"]
    flags += ["--data", str(tmp_path / "train.jsonl"), "--eval", str(tmp_path / "heldout.jsonl")]
    trained.main([*flags, "--batch-rows", "12", "--learning-rate", "1e-2", "--length", "128"])
    told = json.loads((tmp_path / "made.training" / "heldout.json").read_text())
    assert told["right"] >= 5 / 6
    assert served(model, tmp_path / "made", text["heldout"]) == pytest.approx(told["right"], 1e-3)
