"""Fusion packs as an oracle table says, for every table of four sets, and runs on images."""

import argparse
import dataclasses
import itertools
import json

import numpy as np
import pytest
from support.cases.tiny_pictures import sources

from lora_jax.finetune import fusion, training
from lora_jax.finetune.fusion import fuse, shuffled
from lora_jax.finetune.pictures import tasks

ORDER = ("a", "b", "c", "d")
PAIRS = list(itertools.combinations(ORDER, 2))


def packed(friends: set[tuple[str, str]], alone: set[str]):
    """Return the fusion where a set is right if it is `alone` or with friends only."""
    calls = []

    def train(weights, sets):
        calls.append(sets[-1])
        assert sets[:-1] == (weights or ())
        return sets

    def score(weights, name):
        others = (tuple(sorted((name, other))) for other in weights if other != name)
        return float(name not in alone and all(pair in friends for pair in others))

    return fuse(ORDER, dict.fromkeys(ORDER, 0.5), train, score), calls


def oracle(friends: set[tuple[str, str]], alone: set[str]):
    """Return (adapters, rollbacks, trainings) by the rule, on sets of names alone."""
    adapters, rollbacks, opened, trainings = [], [], (), 0
    for name in ORDER:
        trainings += 1
        fits = name not in alone and all(p in friends for p in itertools.product(opened, name))
        if opened and fits:
            opened = (*opened, name)
            continue
        if opened:
            adapters.append(opened)
            rollbacks.append(name)
            trainings += 1
        opened = (name,)
        if name in alone:
            adapters.append(opened)
            opened = ()
    return [*adapters, *([opened] if opened else [])], rollbacks, trainings


def sorted_names(names: set[str]) -> str:
    """Return an id that does not depend on the order of a set."""
    return "".join(sorted(names)) or "none"


@pytest.mark.parametrize("missing", [set(), {"a"}, {"b"}, {"d"}, {"b", "c"}], ids=sorted_names)
def test_every_table_of_four_sets(missing):
    for chosen in itertools.product((False, True), repeat=len(PAIRS)):
        friends = {pair for pair, yes in zip(PAIRS, chosen, strict=True) if yes}
        got, calls = packed(friends, missing)
        adapters, rollbacks, trainings = oracle(friends, missing)
        assert [fused.sets for fused in got.adapters] == adapters
        assert [fused.weights for fused in got.adapters] == adapters, "what was rolled back is out"
        assert list(got.rollbacks) == rollbacks
        assert len(calls) == trainings
        assert set(got.missed) == missing


def test_a_set_that_is_forgotten_closes_the_adapter():
    """Not the new set but an old one falls: measured are all sets of the adapter."""

    def score(weights, name):
        return 0.2 if name == "a" and len(weights) == 3 else 0.9

    got = fuse("abc", dict.fromkeys("abc", 0.5), lambda w, sets: "".join(sets), score)
    assert [fused.sets for fused in got.adapters] == [("a", "b"), ("c",)]
    assert got.rollbacks == ("c",)


def test_the_order_follows_from_the_seed():
    assert sorted(shuffled(ORDER, 1)) == list(ORDER)
    assert shuffled(ORDER, 1) == shuffled(ORDER, 1)
    assert len({shuffled(ORDER, seed) for seed in range(20)}) > 5


def test_trainings_are_taken_up_by_the_same_arguments_only(tmp_path):
    inputs = {name: tmp_path / name for name in ("model", "data")}
    for path in inputs.values():
        path.mkdir()
        (path / "file").write_bytes(b"before")

    def kept(counts=(8, 4), **changed):
        given = {"out": tmp_path / "out", "require": [0.5], "datasets": ["count"], "rehearsal": 0.5}
        return fusion.kept_trainings(argparse.Namespace(**(inputs | given | changed)), counts)

    def is_refused(**changed):
        with pytest.raises(ValueError, match="other arguments, or of other files; choose another"):
            kept(**changed)

    assert kept() == kept(require=[0.6]) == tmp_path / "out" / "trainings"
    assert [file.name for file in kept().iterdir()] == ["arguments.json"]
    is_refused(rehearsal=0.0)
    is_refused(counts=(9, 4))
    for path in inputs.values():
        (path / "file").write_bytes(b"behind")
        is_refused()
        (path / "file").write_bytes(b"before")
    kept()


def test_a_start_that_was_killed_leaves_no_half_written_arguments(tmp_path, monkeypatch):
    given = {"out": tmp_path / "out", "model": tmp_path, "data": tmp_path}
    (tmp_path / "out" / "trainings").mkdir(parents=True)
    (tmp_path / "out" / "trainings" / "arguments.part").write_text("{")
    folder = fusion.kept_trainings(argparse.Namespace(**given), (8, 4))
    written = (folder / "arguments.json").read_text()
    monkeypatch.setattr(fusion.pathlib.Path, "write_text", lambda *_, **__: pytest.fail("written"))
    fusion.kept_trainings(argparse.Namespace(**given), (8, 4))
    assert (folder / "arguments.json").read_text() == written


@pytest.mark.long
def test_a_rollback_gives_back_the_bits(tmp_path, monkeypatch):
    """Trained on real rows; a requirement that nothing meets closes the first adapter.

    The second run takes up what the first has trained.
    """
    from support.cases import tiny_pictures

    from lora_jax.finetune.lora_params import LoraSpec
    from lora_jax.finetune.pictures.adapter import Base
    from lora_jax.finetune.training import Schedule

    base = Base.read(tiny_pictures.write_folder(tmp_path / "tiny"))
    parts = tasks.parts(tiny_pictures.sources())
    spec, schedule = LoraSpec(2, 4.0, ("q_proj", "v_proj")), Schedule(3, 4, 1e-2, 1)

    def run(order, required):
        given = (spec, schedule, (8, 8))
        return fusion.fuse_pictures(base, parts, order, required, *given, folder=tmp_path / "kept")

    alone = run(("any",), {"any": 0.0})
    steps, batch_rows = [], training.batch_rows
    monkeypatch.setattr(training, "batch_rows", lambda *a: (steps.append(a[1]), batch_rows(*a))[1])
    both = run(("any", "count"), {"any": 0.0, "count": 2.0})
    assert steps == [0, 1, 2] * 2, "one training with both sets, one of the second set alone"
    assert (both.rollbacks, both.missed) == (("count",), ("count",))
    assert [set(fused.heldout) for fused in both.adapters] == [{"any"}, {"count"}]
    for got, want in zip(both.adapters, alone.adapters, strict=False):
        assert (got.scores, got.heldout) == (want.scores, want.heldout)
        for name, pair in want.weights.lora.items():
            np.testing.assert_array_equal(got.weights.lora[name].b, pair.b)


class Training:
    """Stands for training and scoring: the sets of an adapter are bits of its bias."""

    def __init__(self, order):
        self.order, self.rows, self.specs = order, [], set()

    def train(self, base, rows, spec, head, schedule, start=None):
        import jax

        from lora_jax.finetune.head import HeadParams
        from lora_jax.finetune.lora_params import init_lora

        assert head is None
        self.rows.append(rows.num_rows)
        self.specs.add((spec, schedule))
        if start is None:
            pairs = init_lora(spec, base.model.catalogue(base.model.config), 0)
            start = HeadParams(
                *map(jax.device_put, (np.zeros((1, 1), "f4"), np.zeros(1, "f4"))), pairs
            )
        sets = np.asarray(start.bias) + np.float32(2 ** (len(self.rows) - 1))
        return dataclasses.replace(start, bias=jax.device_put(sets))

    def score(self, base, params, spec, head, examples, rows):
        """All but the last set get on with each other."""
        asked = examples[0].prompt
        together = float(params.bias[0]) not in (1.0, 2.0, 4.0, 8.0)
        return 0.25 if together and asked == self.order[-1] else 0.75


def test_the_command_writes_an_adapter_of_each_group_and_what_it_scored(
    picture_folder, picture_data, tmp_path, monkeypatch, capsys
):
    from lora_jax.adapters.formats import peft_format
    from lora_jax.finetune.pictures import adapter

    prompts = {"clothes": "Which clothes are these?", "digits": "Which digit is this?"}
    prompts |= {"flags": "Which country has this flag?"}
    order = fusion.shuffled(list(prompts), 3)
    required = ["0.8" if name == order[2] else "0.5" for name in prompts]  # of one, too much
    training = Training([prompts[name] for name in order])
    monkeypatch.setattr(adapter, "train", training.train)
    monkeypatch.setattr(adapter, "score", training.score)
    monkeypatch.setattr(adapter, "with_cells", lambda model, rows, settings: rows)
    monkeypatch.setattr(fusion, "TRAIN_EXAMPLES", 10)
    monkeypatch.setattr(fusion, "HELDOUT", 4)
    flags = ["--model", str(picture_folder), "--data", str(picture_data)]
    flags += ["--out", str(tmp_path / "out")]
    flags += ["--rank", "2", "--rehearsal", "0.3", "--seed", "3", "--steps", "50"]
    fusion.main([*flags, "--datasets", *prompts, "--require", *required])
    told = json.loads((tmp_path / "out" / "fusion.json").read_text())
    assert told["order"] == list(order)
    first, second = told["adapters"]
    assert (first["sets"], second["sets"]) == (list(order[:2]), [order[2]])
    assert first["scores"] == first["heldout"] == dict.fromkeys(order[:2], 0.75)
    assert (told["rollbacks"], told["missed"]) == ([order[2]], [order[2]])
    # A set alone, with three of an earlier set, with three of each of two; then alone.
    assert training.rows == [10, 13, 16, 10]
    ((spec, schedule),) = training.specs
    assert (spec.rank, spec.alpha, schedule.steps, schedule.warmup_steps) == (2, 4.0, 50, 5)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "fusion.json",
        "trainings",
        "-".join(order[:2]),
        order[2],
    }
    base = adapter.Base.read(picture_folder)
    catalogue = base.model.catalogue(base.model.config)
    stored = peft_format.read(tmp_path / "out" / order[2], catalogue, base_names=("tiny",))
    assert set(stored.report.modules) == set(adapter.TEXT_MODULES)
    assert f"{order[2]}: 0.250 on half 0, 0.8 required" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--datasets", "digits", "kind", "--require", "0.5"], "one accuracy for each"),
        (["--datasets", "digits", "digits", "--require", "0.5", "0.5"], "which differ"),
        (["--datasets", "digits", "--require", "1", "--rehearsal", "2"], "2.0 is not a share"),
        (["--datasets", "digits", "--require", "80"], "80.0 of digits is no accuracy, 0 to 1"),
        (["--datasets", "digits", "--require", "nan"], "nan of digits is no accuracy"),
        (["--datasets", "digits", "--require", "1", "--model", "M"], "M is no folder"),
    ],
)
def test_flags_that_do_not_fit_are_refused(capsys, tmp_path, flags, message):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        fusion.main(["--model", str(tmp_path), "--data", "D", "--out", "O", *flags])
    assert message in capsys.readouterr().err


def test_pictures_that_are_not_there_are_named_before_the_model_is_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    flags = ["--model", str(tmp_path), "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    asked = [*flags, "--datasets", "digits", "count", "--require", "0.5", "0.5"]
    with pytest.raises(ValueError, match="has no pictures"):
        fusion.main(asked)
    some = {name: source for name, source in sources().items() if name == "digits"}
    monkeypatch.setattr(tasks, "read_sources", lambda folder: some)
    with pytest.raises(ValueError, match=r"task 'count' needs emoji\.npz"):
        fusion.main(asked)
    assert not (tmp_path / "out").exists()
