"""The flags that training commands share say what they are said to."""

import pathlib
import sys

import pytest
from support.cases.finetune_cases import RECORDS, make_folder

from lora_jax.finetune.command import documents_of, run, schedule_of, state_of, training_parser
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.records import write_jsonl

NEEDED = ["--model", "m", "--data", "d", "--out", "some/out"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> None:
    """A folder with the model m and the file d."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "d").touch()
    monkeypatch.chdir(tmp_path)


def parse(*more: str):
    return training_parser("lora", "text", 0.5).parse_args([*NEEDED, *more])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gone"], "--model: gone is no folder; give the folder of a model"),
        (["--model", "."], "--model: . has no config.json"),
        (["--data", "d", "gone"], "--data: there is no file gone"),
    ],
)
def test_what_is_not_there_is_named_before_the_model_is_loaded(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse(*flags)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "warmup"), [(9, 0), (50, 5), (1000, 20)])
def test_the_schedule_is_that_of_the_flags(steps, warmup):
    schedule = schedule_of(parse("--steps", str(steps), "--seed", "3", "--weight-decay", "0.1"))
    assert (schedule.steps, schedule.warmup_steps) == (steps, warmup)
    assert (schedule.learning_rate, schedule.seed, schedule.weight_decay) == (0.5, 3, 0.1)
    assert (schedule.batch_rows, schedule.checkpoint_every) == (4, 50)


def test_training_is_kept_beside_the_adapter_unless_said_otherwise():
    assert state_of(parse()) == pathlib.Path("some/out.training")
    assert state_of(parse("--state", "there")) == pathlib.Path("there")


def test_documents_come_from_all_files_in_the_models_own_form(tmp_path):
    folder = make_folder(tmp_path / "tiny")
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    write_jsonl(files[0], RECORDS[:1])
    write_jsonl(files[1], RECORDS[1:])
    args = parse("--style", "plain")
    args.model, args.data = folder, files
    assert documents_of(args) == read_format(folder).documents(RECORDS, "plain")


def test_a_missing_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        training_parser("lora", "text", 0.5).parse_args(NEEDED[:4])
    assert "--out" in capsys.readouterr().err


def test_a_refused_input_ends_a_command_with_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["finetune", "--rank", "3"])
    given = []

    def refuse(argv: list[str]) -> None:
        given.extend(argv)
        raise ValueError("base is quantised already")

    with pytest.raises(SystemExit, match=r"^error: base is quantised already$"):
        run(refuse)
    assert given == ["--rank", "3"]
