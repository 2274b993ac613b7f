"""A run that is stopped and taken up again ends where an unbroken one ends."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.finetune.documents import Document
from lora_jax.finetune.packing import pack
from lora_jax.finetune.training import Schedule, batch_rows, fit, mean_loss

TEXT = pack(
    [Document(tuple(np.random.default_rng(i).integers(0, 8, 9).tolist()), 0) for i in range(7)], 8
)
SCHEDULE = Schedule(steps=12, batch_rows=3, learning_rate=0.3, warmup_steps=2, weight_decay=0.01)


def loss(table, frozen, batch):
    return mean_loss(table["next"][batch.tokens] + frozen[None, None], batch.targets, batch.weights)


def run(**options):
    start = {"next": jnp.zeros((8, 8)), "bias": jnp.zeros(8)}
    return fit(start, jnp.zeros(8), loss, TEXT, SCHEDULE, **options)


def test_training_lowers_the_loss():
    before = loss({"next": jnp.zeros((8, 8))}, jnp.zeros(8), TEXT.take(np.arange(7)))
    after = loss(run(), jnp.zeros(8), TEXT.take(np.arange(7)))
    assert float(before) == pytest.approx(np.log(8), abs=1e-5)
    assert float(after) < 0.8 * float(before)


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_stopped_and_resumed_equals_unbroken(tmp_path, stop):
    whole = run(folder=tmp_path / "whole")
    run(folder=tmp_path / "halves", stop_after=stop)
    halves = run(folder=tmp_path / "halves")
    for want, got in zip(jax.tree.leaves(whole), jax.tree.leaves(halves), strict=True):
        np.testing.assert_array_equal(got, want)
    logs = [(tmp_path / name / "loss.jsonl").read_text() for name in ("whole", "halves")]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == SCHEDULE.steps


def test_a_finished_run_is_not_run_again(tmp_path):
    first = run(folder=tmp_path)
    again = run(folder=tmp_path)
    np.testing.assert_array_equal(again["next"], first["next"])


def test_a_folder_of_another_schedule_is_refused(tmp_path):
    run(folder=tmp_path)
    other = Schedule(steps=13, batch_rows=3, learning_rate=0.1, warmup_steps=2)
    with pytest.raises(ValueError, match="another schedule"):
        fit({"next": jnp.zeros((8, 8))}, None, loss, TEXT, other, folder=tmp_path)


def test_every_epoch_takes_every_row_once():
    rows = np.concatenate([batch_rows(7, step, SCHEDULE) for step in range(14)]).reshape(-1, 7)
    assert (np.sort(rows, axis=1) == np.arange(7)).all()
    assert (rows[0] != rows[1]).any()


@pytest.mark.parametrize(
    "wrong", [{"steps": 2}, {"batch_rows": 0}, {"learning_rate": 0.0}, {"warmup_steps": -1}]
)
def test_a_senseless_schedule_is_refused(wrong):
    with pytest.raises(ValueError, match=r"too few|none after"):
        Schedule(**{"steps": 9, "batch_rows": 1, "learning_rate": 1.0, "warmup_steps": 2} | wrong)
