"""Fusion packs as an oracle table says, for every table of four sets, and runs on images."""

import argparse
import itertools

import numpy as np
import pytest

from lora_jax.finetune import fusion, training
from lora_jax.finetune.fusion import fuse, shuffled

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
    def args(**changed):
        given = {"out": tmp_path, "require": [0.5], "datasets": ["count"], "rehearsal": 0.5}
        return argparse.Namespace(**(given | changed))

    folder = fusion.kept_trainings(args())
    assert fusion.kept_trainings(args(require=[0.6])) == folder == tmp_path / "trainings"
    with pytest.raises(ValueError, match="other arguments; choose another --out"):
        fusion.kept_trainings(args(rehearsal=0.0))


@pytest.mark.long
def test_a_rollback_gives_back_the_bits(tmp_path, monkeypatch):
    """Trained on real rows; a requirement that nothing meets closes the first adapter.

    The second run takes up what the first has trained.
    """
    from support.cases import tiny_pictures

    from lora_jax.finetune.lora_params import LoraSpec
    from lora_jax.finetune.pictures import tasks
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
