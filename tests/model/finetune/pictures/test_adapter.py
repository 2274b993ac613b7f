"""An adapter with a head is trained on images, written, and served with the answers it learned."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cases.finetune_cases import trace_training

from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune.lora_params import LoraSpec
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
    import jax.numpy as jnp

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


def drawn(data, task, count):
    """Return the examples that the command measures on."""
    return tasks.draw(task, tasks.parts(tasks.read_sources(data))[True], count, 7)
