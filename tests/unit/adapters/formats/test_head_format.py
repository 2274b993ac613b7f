"""Task heads of PEFT folders: what is read, and what is refused by name."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.cases import adapter_cases as cases
from support.cases.head_cases import write_head

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.head_format import HEAD_FILE, labels_of, parse
from lora_jax.adapters.task_head import SCORE, HeadKind, head_logits, with_head

CATALOGUE = with_head(cases.llama(), 16, 3)
RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.normal(size=(3, 16)).astype("f4"), RNG.normal(size=3).astype("f4")
LABELS = ["a", "b", "c"]


def read(folder, catalogue=CATALOGUE, **more):
    return peft_format.read(folder, catalogue, **more)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
def test_a_head_is_a_site_that_computes_its_logits(tmp_path, bias):
    write_head(tmp_path / "h", LABELS, WEIGHT, bias)
    weights = read(tmp_path / "h")
    assert list(weights.sites) == [(SCORE, 0)]
    site, state = weights.sites[SCORE, 0], RNG.normal(size=16).astype("f4")
    got = site.scaling * (state @ site.a[0].T) @ site.b[0][:3] + site.b[0][3]
    np.testing.assert_allclose(got[:3], head_logits(state, WEIGHT, bias), rtol=1e-5, atol=1e-6)
    assert not got[3:].any()
    report = weights.report
    assert (report.head.kind, report.head.labels) == (HeadKind.CLASS, ("a", "b", "c"))
    assert HEAD_FILE in report.files
    assert report.max_rank == 0
    assert labels_of(tmp_path / "h") == 3
    json.dumps(report.as_json())


def test_a_head_beside_lora(tmp_path):
    cases.write_adapter(tmp_path / "a", cases.dense_tensors())
    plain = read(tmp_path / "a")
    assert labels_of(tmp_path / "a") == 0
    write_head(tmp_path / "a", LABELS, WEIGHT, kind="multi_label")
    both = read(tmp_path / "a")
    assert both.sites.keys() - plain.sites.keys() == {(SCORE, 0)}
    assert both.report.max_rank == plain.report.max_rank
    assert both.digest != plain.digest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "regression", "labels": ["a"]}, "kind is 'regression'; allowed are class"),
        ({"labels": ["a"]}, "kind is None"),
        ({"kind": "class"}, "labels must be a list of 1 to 1024"),
        ({"kind": "class", "labels": []}, "labels must be a list"),
        ({"kind": "class", "labels": ["a"] * 1025}, "labels must be a list of 1 to 1024"),
        ({"kind": "class", "labels": ["a", "b", "a"]}, "label 'a' stands twice"),
        ({"kind": "class", "labels": ["a", 2]}, "label 2 is no text"),
        ({"kind": "class", "labels": ["", "b"]}, "label '' is no text"),
        ({"kind": "class", "labels": ["x" * 257]}, "is no text of 1 to 256"),
        ({"kind": "count", "labels": ["1", "2"]}, 'a count are "0", "1"'),
        ({"kind": "class", "labels": ["a"], "pooling": "mean"}, "pooling is 'mean'; 'last' is"),
        ({"kind": "class", "labels": ["a"], "threshold": 1}, "key 'threshold' is not known"),
    ],
)
def test_what_task_head_json_may_not_say(given, message):
    with pytest.raises(ValueError, match=message):
        parse(given)


def test_a_count_has_numbers():
    assert parse({"kind": "count", "labels": ["0", "1"], "pooling": "last"}).kind is HeadKind.COUNT


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    def refused(message, weight=WEIGHT, bias=BIAS, labels=LABELS, catalogue=CATALOGUE, **more):
        write_head(tmp_path / "h", labels, weight, bias)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "h", catalogue, **more)

    refused(r"score.weight has shape \(2, 16\); 3 labels", WEIGHT[:2])
    refused(r"score.weight has shape \(3, 8\); .* are \(3, 16\)", WEIGHT[:, :8])
    refused(r"score.bias has shape \(2,\), not \(3,\)", bias=BIAS[:2])
    refused("score.weight has values that are NaN", np.full_like(WEIGHT, np.nan))
    refused("score.bias has values that are NaN", bias=np.full_like(BIAS, np.inf))
    many = [str(n) for n in range(65)]
    refused("65 labels; the server takes 64", np.zeros((65, 16)), np.zeros(65), many)
    refused("no room for heads here.*max_lora_cls_labels of 3", catalogue=cases.llama())
    refused("task head was made for the base model 'tiny', served on 'x'", base_names=("x",))
    read(tmp_path / "h", base_names=("x", "some/tiny"))


def test_files_of_a_head_belong_together(tmp_path):
    write_head(tmp_path / "h", LABELS, WEIGHT)
    (tmp_path / "h" / HEAD_FILE).unlink()
    with pytest.raises(ValueError, match=r"modules_to_save .* needs a task_head.json beside it"):
        read(tmp_path / "h")
    (tmp_path / "h" / HEAD_FILE).write_text("[]")
    with pytest.raises(ValueError, match=r"task_head.json: not a JSON object"):
        read(tmp_path / "h")
    (tmp_path / "h" / HEAD_FILE).write_text('{"kind": "class", "labels": ["a", "b", "c"]}')
    save_file({"base_model.model.score.w": WEIGHT}, tmp_path / "h" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"no base_model.model.score.weight"):
        read(tmp_path / "h")
    tensors = {"base_model.model.score.weight": WEIGHT, "base_model.model.score.x": BIAS}
    save_file(tensors, tmp_path / "h" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"score.x is not a LoRA matrix"):
        read(tmp_path / "h")


def test_a_head_of_boxes():
    head = parse({"kind": "boxes", "labels": LABELS, "queries": 6})
    assert (head.kind, head.size) == (HeadKind.BOXES, 48)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"kind": "boxes"}, "queries is None; a head of kind boxes needs 1 to 100"),
        ({"kind": "boxes", "queries": True}, "queries is True"),
        ({"kind": "boxes", "queries": 101}, "queries is 101"),
        ({"kind": "class", "queries": 2}, "queries belong to a head of kind boxes, not class"),
        (
            {"kind": "boxes", "labels": [str(n) for n in range(100)], "queries": 10},
            "are 1050 numbers; at most 1024",
        ),
    ],
)
def test_queries_that_do_not_fit_are_refused(given, why):
    with pytest.raises(ValueError, match=why):
        parse({"labels": LABELS, **given})
