"""An adapter with a head is trained on images, written, and served with the answers it learned."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cases.finetune_cases import trace_training

from lora_jax.adapters.task_head import HeadKind, TaskHead
from lora_jax.finetune.lora_params import LoraPair, LoraSpec, init_lora
from lora_jax.finetune.pictures import adapter, tasks
from lora_jax.finetune.pictures.checkpoint import IMAGE
from lora_jax.finetune.training import Schedule
from serving import Engine

TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_heads_have_the_labels_of_the_examples(picture_parts):
    drawn = tasks.draw("count", picture_parts[False], 30, 0)
    count = adapter.head_for(HeadKind.COUNT, drawn)
    assert count.labels == tuple(str(n) for n in range(len(count.labels)))
    found = adapter.head_for(HeadKind.BOXES, tasks.draw("boxes", picture_parts[False], 3, 0))
    assert found.size == adapter.QUERIES * (len(found.labels) + 5)


@pytest.mark.long
def test_a_head_of_boxes_learns_and_is_served(
    picture_base, picture_folder, picture_parts, tmp_path
):
    """LoRA on tower and language model; the engine's boxes are those of training."""
    base, examples = picture_base, tasks.draw("boxes", picture_parts[False], 4, 0)
    head = adapter.head_for(HeadKind.BOXES, examples)
    spec = LoraSpec(2, 4.0, ("q_proj", "visual.attn.qkv"))
    rows = base.rows(examples, head, tower=True)
    losses = []
    for steps in (2, 30):
        schedule = Schedule(steps, 4, 1e-2, 1)
        params = adapter.train(base, rows, spec, head, schedule)
        losses.append(adapter.score(base, params, spec, head, examples, rows))
    assert losses[1] >= losses[0]
    catalogue = base.model.catalogue(base.model.config)
    adapter.save_adapter(tmp_path / "b", params.lora, spec, catalogue, base_name="tiny")
    adapter.add_head(
        tmp_path / "b", head, np.asarray(params.weight), np.asarray(params.bias), np.dtype("f4")
    )
    told = json.loads((tmp_path / "b" / "task_head.json").read_text())
    assert (told["kind"], told["queries"]) == ("boxes", adapter.QUERIES)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "structured_outputs": False}
    sizes |= {"dtype": "float32", "max_esft_adapters": 0}
    with Engine(str(picture_folder), {"b": tmp_path / "b"}, **sizes) as engine:
        prompt = TURN.format(IMAGE + examples[0].prompt)
        images = [[e.images[0]] for e in examples]
        together = engine.classify([prompt] * 4, "b", images=images)
        for n, answer in enumerate(together):
            (alone,) = engine.classify([prompt], "b", images=[images[n]])
            assert alone.outputs == answer.outputs, "bits alone and in a batch"
    for row, answer in enumerate(together):
        want = head.answer(reference(base, params, spec, rows, row))
        assert [box.label for box in answer.outputs.boxes] == [box.label for box in want.boxes]
        np.testing.assert_allclose(answer.outputs.logits, want.logits, atol=1e-3)


def reference(base, params, spec, rows, row):
    """Return the head's logits of one row by the forward pass of training."""
    delta = adapter.trained_delta(params.lora, spec, base.model.catalogue(base.model.config))
    values, batch = jnp.asarray(base.settings.values), rows.take(np.arange(row, row + 1))
    return np.asarray(
        params.logits(adapter.head_states(base.model, batch, values, rows.grid, delta))
    )[0]


@pytest.mark.long
def test_the_command(picture_folder, picture_data, tmp_path):
    flags = ["--model", str(picture_folder), "--data", str(picture_data), "--task", "count"]
    flags += ["--head", "count", "--out", str(tmp_path / "a"), "--examples", "40", "--steps", "4"]
    adapter.main(flags)
    told = json.loads((tmp_path / "a" / "heldout.json").read_text())
    assert set(told) == {"task", "heldout", "adapter", "base", "head_alone"}


def test_the_command_trains_a_head_above_the_tower_s_lora_and_one_alone(
    picture_folder, picture_data, tmp_path, monkeypatch
):
    """Its training is traced only: the scores are of heads that always say the first label."""
    fits, measured, out = trace_training(monkeypatch, adapter), [], tmp_path / "a"

    def right_answers(model, rows, settings, lora, batch):
        measured.append((rows.num_rows, rows.cells is None, lora))
        return np.arange(rows.num_rows) % 4 == 0

    monkeypatch.setattr(adapter, "right_answers", right_answers)
    flags = ["--model", str(picture_folder), "--data", str(picture_data), "--task", "count"]
    flags += ["--head", "count", "--tower", "--rank", "2", "--examples", "20", "--heldout"]
    adapter.main([*flags, "20", "--steps", "30", "--batch-rows", "3", "--out", str(out)])
    both, alone = fits
    assert (both.text.num_rows, both.schedule.warmup_steps) == (20, 3)
    assert both.text.cells is None  # the tower is trained
    assert alone.text.pixels is None  # it has been through the tower
    np.testing.assert_array_equal(both.text.wanted, alone.text.wanted)
    told = json.loads((out / "heldout.json").read_text())
    nothing = np.mean([example.labels == ("0",) for example in drawn(picture_data, "count", 20)])
    assert 0 < nothing < 1
    assert measured == [(20, False, None)]  # the base has no adapter
    want = {"task": "count", "heldout": 20, "base": 0.25}
    assert told == want | dict.fromkeys(("adapter", "head_alone"), nothing)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert json.loads((out / "task_head.json").read_text())["kind"] == "count"
    assert any("visual" in name for name in load_file(out / "adapter_model.safetensors"))


def test_words_are_learned_beside_the_head(picture_base, picture_parts, monkeypatch):
    """The head reads the last prompt token, so answers behind it change nothing of its loss."""
    base, examples = picture_base, tasks.draw("presence", picture_parts[False], 2, 0)
    head, spec = adapter.head_for(HeadKind.MULTI_LABEL, examples), LoraSpec(2, 4.0, ("q_proj",))
    catalogue, values = base.model.catalogue(base.model.config), jnp.asarray(base.settings.values)
    plain = base.rows(examples, head, tower=False)
    told = base.rows(examples, head, tower=False, words=True)
    assert (plain.weights.sum(1) < told.weights.sum(1)).all(), "the end alone, and an answer"
    losses = []

    def fit(start, frozen, loss, rows, schedule, **_):
        losses.append(lambda: loss(start, frozen, rows.take(np.arange(2))))
        return start

    monkeypatch.setattr(adapter, "fit", fit)
    start = adapter.new_head(head, base.model.config.hidden_size, init_lora(spec, catalogue, 0), 0)
    weight = jax.random.normal(jax.random.key(1), start.weight.shape)
    start = dataclasses.replace(start, weight=weight)
    for rows, words in ((plain, False), (told, True)):
        adapter.train(base, rows, spec, head, Schedule(2, 2, 1e-2, 1), start, words=words)

    @jax.jit
    def measured():
        delta = adapter.trained_delta(start.lora, spec, catalogue)
        batch = told.take(np.arange(2))
        logits = adapter.picture_logits(base.model, batch, values, told.grid, delta)
        in_words = adapter.mean_loss(logits, batch.targets, batch.weights)
        return *(loss() for loss in losses), in_words

    by_head, both, in_words = map(float, measured())
    assert by_head != pytest.approx(np.log(2)), "the head says something"
    assert both == pytest.approx(by_head + in_words, rel=1e-5)
    assert in_words > 1


def test_an_adapter_is_trained_on_from_its_folder(picture_base, tmp_path):
    """LoRA and head as they were written; what the folder has not is refused by name."""
    base, spec = picture_base, LoraSpec(2, 4.0, ("q_proj", "visual.attn.qkv"))
    catalogue = base.model.catalogue(base.model.config)
    head = TaskHead(HeadKind.CLASS, ("cat", "dog"))
    rng = np.random.default_rng(0)
    lora = {
        name: LoraPair(*(jnp.asarray(rng.normal(size=m.shape), jnp.float32) for m in (p.a, p.b)))
        for name, p in init_lora(spec, catalogue, 0).items()
    }
    weight, bias = rng.normal(size=(2, base.model.config.hidden_size)), rng.normal(size=2)
    adapter.save_adapter(tmp_path / "a", lora, spec, catalogue, base_name=base.name)
    alone = adapter.started(tmp_path / "a", base, spec, head)
    assert not alone.weight.any(), "the folder has no head yet"
    adapter.add_head(tmp_path / "a", head, weight, bias, np.dtype("f4"))
    found = adapter.started(tmp_path / "a", base, spec, head)
    assert found.lora.keys() == lora.keys()
    for got, want in zip(jax.tree.leaves(found.lora), jax.tree.leaves(lora), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(found.weight, weight.astype(np.float32))
    np.testing.assert_array_equal(found.bias, bias.astype(np.float32))
    with pytest.raises(ValueError, match="a has not k_proj with rank 2"):
        adapter.started(tmp_path / "a", base, LoraSpec(2, 4.0, ("q_proj", "k_proj")), head)
    with pytest.raises(ValueError, match="a has not q_proj with rank 4"):
        adapter.started(tmp_path / "a", base, LoraSpec(4, 8.0, ("q_proj",)), head)
    with pytest.raises(ValueError, match="a has a head"):
        adapter.started(tmp_path / "a", base, spec, TaskHead(HeadKind.CLASS, ("cat", "cow")))


def test_words_without_a_head_are_refused(tmp_path, capsys):
    flags = ["--model", "M", "--data", "D", "--task", "count", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        adapter.main([*flags, "--words"])
    assert "--words goes with --head" in capsys.readouterr().err


def test_the_command_trains_an_adapter_on_in_words_too(
    picture_folder, picture_data, tmp_path, monkeypatch
):
    fits, measured = trace_training(monkeypatch, adapter), []

    def score(base, params, spec, head, examples, rows):
        measured.append((head is not None, spec is not None, float(rows.weights.sum(1).mean())))
        return 0.5

    monkeypatch.setattr(adapter, "score", score)
    flags = ["--model", str(picture_folder), "--data", str(picture_data), "--task", "count"]
    flags += ["--head", "count", "--rank", "2", "--examples", "20", "--heldout", "20"]
    flags += ["--steps", "1", "--batch-rows", "3", "--words", "--tower"]
    adapter.main([*flags, "--out", str(tmp_path / "a")])
    both, alone = (fit.text.weights.sum(1) for fit in fits)
    assert (both == alone + 1).all(), "a figure before the end; the head alone needs no answers"
    adapter.main([*flags, "--start", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert len(fits) == 3, "no head alone"
    end = float(alone[0])
    told = json.loads((tmp_path / "b" / "heldout.json").read_text())
    assert set(told) == {"task", "heldout", "adapter", "words", "base"}
    assert measured[-3:] == [(True, True, end), (False, True, end + 1), (False, False, end + 1)]
    a, b = (load_file(tmp_path / n / "adapter_model.safetensors") for n in "ab")
    assert a.keys() == b.keys()
    assert all((a[name] == b[name]).all() for name in a), "training was traced only"


@pytest.mark.parametrize("kind", [HeadKind.BOXES, HeadKind.COUNT])
def test_words_that_tell_boxes_are_scored_by_an_engine_alone(picture_base, monkeypatch, kind):
    """The command counts whole answers that are equal, and boxes may be right and not equal."""
    monkeypatch.setattr(adapter.Base, "rows", lambda *given, **options: None)
    monkeypatch.setattr(adapter, "score", lambda *given: 0.5)
    head, spec = TaskHead(kind, ("0", "1"), 2 * (kind is HeadKind.BOXES)), LoraSpec(2, 4.0, ("o",))
    args = adapter.parser().parse_args(
        ["--model", "M", "--data", "D", "--task", "boxes", "--out", "O", "--words", "--head", kind]
    )
    found = adapter.scores(args, picture_base, adapter.new_head(head, 8, {}, 0), spec, head, [])
    assert ("words" in found) == (kind is HeadKind.COUNT)


def drawn(data, task, count):
    """Return the examples that the command measures on."""
    return tasks.draw(task, tasks.parts(tasks.read_sources(data))[True], count, 7)
