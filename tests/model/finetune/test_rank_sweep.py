"""Halving and doubling: which ranks are tried, and which is chosen."""

import json

import pytest
from support.cases.finetune_cases import (
    RECORDS,
    WIDE_CONFIG,
    make_folder,
    train_nothing,
    write_domain,
)

from lora_jax.finetune import rank_sweep
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.perplexity import Measured
from lora_jax.finetune.rank_sweep import share_of_gain, sweep, trained_perplexity
from lora_jax.finetune.training import Schedule
from lora_jax.models import load


def enough_from(rank):
    """A task that a rank can do, or cannot."""
    return lambda tried: 2.0 if tried >= rank else 5.0


@pytest.mark.parametrize(
    ("least", "tried", "chosen"),
    [
        (8, [16, 8, 4], 8),
        (16, [16, 8], 16),
        (17, [16, 32], 32),
        (1, [16, 8, 4, 2, 1], 1),
        (1000, [16, 32, 64], None),
    ],
)
def test_the_smallest_rank_that_meets_the_bar(least, tried, chosen):
    found = sweep(enough_from(least), lambda _: 3.0, highest=64)
    assert (list(found.perplexity), found.chosen) == (tried, chosen)


def test_the_bar_is_a_share_of_the_gain_in_nats():
    bar = share_of_gain(0.5, base=8.0)
    assert bar(2.0) == pytest.approx(4.0)
    assert share_of_gain(1.0, 8.0)(2.0) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="must hold the first one, 16"):
        sweep(enough_from(1), bar, highest=8)


def test_the_table_has_bytes_and_the_choice():
    found = sweep(enough_from(8), lambda _: 3.0)
    shown = rank_sweep.table(found, 9.0, lambda rank: 1000 * rank).splitlines()
    assert shown[2:] == [
        "| no adapter | 0 | 9.000 | |",
        "| 4 | 4,000 | 5.000 | no |",
        "| 8 | 8,000 | 2.000 | yes, smallest |",
        "| 16 | 16,000 | 2.000 | yes |",
        "",
        "Bar: perplexity 3.000.",
    ]


class RankJudge:
    """Stands for the evaluator: an adapter's nats a token fall with its rank."""

    def __init__(self, model, length):
        self.lengths, self.texts = [length], []

    def measure(self, documents, delta=None):
        self.texts.append(documents)
        rank = 0 if delta is None else delta.rank
        return Measured(10.0 - min(rank, 4), 10)


@pytest.mark.parametrize(
    ("flags", "tried", "chosen"),
    [
        pytest.param(["--bar", "0.9"], [8, 4, 2], 4, id="share of the gain"),
        pytest.param(["--perplexity", "1.5"], [8, 16, 32], None, id="perplexity that none meets"),
    ],
)
def test_the_command_trains_on_one_part_and_measures_on_the_other(
    read_only_folder, tmp_path, monkeypatch, capsys, flags, tried, chosen
):
    words = [(f"was kostet {n} mal {n * n}", f"es ist {n:b}") for n in range(100)]
    write_domain(tmp_path, "law", words)
    judges, fits = [], train_nothing(monkeypatch, rank_sweep)

    def judge(*given):
        judges.append(RankJudge(*given))
        return judges[-1]

    monkeypatch.setattr(rank_sweep, "Evaluator", judge)
    command = [
        "--model",
        str(read_only_folder),
        "--data",
        str(tmp_path),
        "--text",
        "law",
        "--steps",
        "20",
    ]
    command += ["--start", "8", "--highest", "32", "--out", str(tmp_path / "out.json")]
    rank_sweep.main([*command, *flags])
    told = json.loads((tmp_path / "out.json").read_text())
    assert [int(rank) for rank in told["perplexity"]] == tried
    assert told["chosen"] == chosen
    assert [fit.label for fit in fits] == [f"rank {rank}" for rank in tried]
    assert {(fit.schedule.steps, fit.schedule.warmup_steps) for fit in fits} == {(20, 2)}
    (judged,) = judges
    assert len({len(text) for text in judged.texts}) == 1
    assert 1 <= len(judged.texts[0]) < 30  # of a hundred
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| no adapter | 0 | 2.718 |")
    assert any(", smallest" in line for line in lines) == (chosen is not None)


def test_text_of_ones_own_is_a_file_of_records(tmp_path):
    rows = [{"prompt": f"was kostet {n} mal {n * n}", "answer": f"{n:b}"} for n in range(100)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = rank_sweep.parts_of(tmp_path / "mine.jsonl", "intent")
    assert 1 <= len(parts.heldout) < 30
    assert {record.prompt for record in parts.train} < {row["prompt"] for row in rows}
    assert not {*parts.train} & {*parts.heldout}


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        (None, [], "No such file"),
        ("{}", [], "mine.jsonl line 1 needs the strings 'prompt' and 'answer'"),
        ('{"prompt": "a", "answer": "b"}', [], "too few records"),
        ('{"prompt": "a", "answer": "b"}', ["--start", "0"], "must hold the first one, 0"),
        ("", ["--bar", "1.1"], "above 0 and at most 1, got 1.1"),
        ("", ["--bar", "nan"], "above 0 and at most 1, got nan"),
        ("", ["--bar", "0"], "above 0 and at most 1, got 0"),
        ("", ["--perplexity", "0.9"], "at least 1, got 0.9"),
        ("", ["--perplexity", "nan"], "at least 1, got nan"),
        ("", ["--perplexity", "inf"], "at least 1, got inf"),
        ("", ["--steps", "0"], "--steps must be at least 1, got 0"),
        ("", ["--out", "/no/where.json"], "there is no folder '/no'; make it first"),
    ],
)
def test_what_cannot_be_swept_is_told_before_a_model_is_loaded(
    tmp_path, capsys, content, flags, said
):
    if content is not None:
        (tmp_path / "mine.jsonl").write_text(content)
    command = ["--model", "nowhere", "--data", str(tmp_path / "mine.jsonl"), *flags]
    with pytest.raises(SystemExit):
        rank_sweep.main(command)
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told(tmp_path, capsys):
    rows = [json.dumps({"prompt": f"p {n * n}", "answer": f"{n:b}"}) for n in range(100)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    with pytest.raises(SystemExit):
        rank_sweep.main(["--model", "nowhere", "--data", str(tmp_path / "mine.jsonl")])
    assert "There is no folder nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_an_adapter_of_each_rank_is_trained_and_measured(tmp_path):
    folder = make_folder(tmp_path / "tiny", scale=5.0, config=WIDE_CONFIG)
    model, _ = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")
    schedule = Schedule(steps=15, batch_rows=2, learning_rate=2e-2, warmup_steps=1)
    base, measure = trained_perplexity(model, documents, documents, schedule, length=32)
    found = sweep(measure, share_of_gain(0.9, base), start=2, highest=4)
    assert found.perplexity[2] < 0.9 * base
    assert found.bar > found.perplexity[2]
    assert list(found.perplexity) == [2, 1]
