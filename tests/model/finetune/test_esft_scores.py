"""Scores are the paper's formulas and the choice is the released one, on real routing too."""

import gzip
import json

import numpy as np
import pytest

from lora_jax.finetune.esft_scores import (
    RoutingTotals,
    expert_config,
    select_experts,
    summary,
    write_config,
)

DOMAINS = ("intent", "law", "summary", "translation")
# Tokens in the source of which the kept routing is the beginning, as its README says.
SOURCE_TOKENS = 8222
IDS = np.array([[0, 2], [0, 1], [2, 0], [0, 2]])
GATES = np.array([[0.5, 0.25], [0.75, 0.125], [0.25, 0.125], [0.5, 0.0625]])


def totals(ids=IDS, gates=GATES, num_experts=4) -> RoutingTotals:
    made = RoutingTotals(num_experts)
    made.add(ids, gates)
    return made


def test_the_gate_score_is_the_mean_gate_over_all_tokens():
    want = [(0.5 + 0.75 + 0.125 + 0.5) / 4, 0.125 / 4, (0.25 + 0.25 + 0.0625) / 4, 0.0]
    np.testing.assert_array_equal(totals().scores("gate"), want)


def test_the_token_score_is_the_share_of_choices():
    np.testing.assert_array_equal(totals().scores("token"), [4 / 8, 1 / 8, 3 / 8, 0])


def test_scores_are_the_formulas_on_random_routing_added_in_parts():
    rng = np.random.default_rng(0)
    dense = rng.random((50, 8))
    ids = np.argsort(-dense, axis=1)[:, :3]
    gates = np.take_along_axis(dense, ids, axis=1)
    kept = np.where(dense >= gates[:, -1:], dense, 0.0)
    made = RoutingTotals(8)
    for part in np.split(np.arange(50), [7, 8, 30]):
        made.add(ids[part], gates[part])
    np.testing.assert_allclose(made.scores("gate"), kept.mean(0), rtol=1e-12)
    np.testing.assert_allclose(made.scores("token"), (kept > 0).mean(0) / 3, rtol=1e-12)


def test_the_fewest_experts_that_reach_the_threshold_are_chosen_best_first():
    scores = {1: np.array([0.1, 0.5, 0.25, 0.15]), 3: np.array([0.25, 0.25, 0.25, 0.25])}
    assert select_experts(scores, 0.5) == {1: (1,), 3: (0, 1)}
    assert select_experts(scores, 0.51) == {1: (1, 2), 3: (0, 1, 2)}
    assert select_experts(scores, 1e-9) == {1: (1,), 3: (0,)}


def test_scores_that_never_reach_the_threshold_choose_all():
    assert select_experts({0: np.array([0.1, 0.2])}, 0.9) == {0: (1, 0)}


@pytest.mark.parametrize("top_p", [0.0, -0.1, 1.5])
def test_a_senseless_threshold_is_refused(top_p):
    with pytest.raises(ValueError, match="top_p"):
        select_experts({0: np.array([1.0])}, top_p)


def test_bad_routing_is_refused():
    with pytest.raises(ValueError, match="of a layer of 2"):
        totals(num_experts=2)
    with pytest.raises(ValueError, match=r"\(4, 2\) and gates \(4, 1\) must be"):
        totals(gates=GATES[:, :1])
    with pytest.raises(ValueError, match="nothing to score"):
        RoutingTotals(4).scores("gate")
    with pytest.raises(ValueError, match="'best' is not one of"):
        totals().scores("best")


def scores_of(written: dict, kind: str) -> dict[int, np.ndarray]:
    """Return one score of a summary.json; its layers and experts are numbers as strings."""
    rows = {int(layer): row for layer, row in written[f"{kind}_scores"].items()}
    return {n: np.array([row[str(e)] for e in range(len(row))]) for n, row in rows.items()}


def test_a_summary_has_both_scores_of_every_layer_and_expert():
    made = json.loads(json.dumps(summary({0: totals(), 2: totals(ids=3 - IDS)})))
    assert list(made) == ["token_scores", "gate_scores"]
    for kind in ("token", "gate"):
        again = scores_of(made, kind)
        assert list(again) == [0, 2]
        np.testing.assert_array_equal(again[0], totals().scores(kind))
        np.testing.assert_array_equal(again[2], totals().scores(kind)[::-1])


def test_the_config_is_written_as_esft_does(tmp_path):
    write_config(tmp_path / "new", {1: (3, 0), 10: (2,)})
    written = json.loads((tmp_path / "new" / "expert_cfg.json").read_text())
    assert written == {
        "experts": {"1": [3, 0], "10": [2]},
        "shared_experts": False,
        "non_expert_modules": False,
    }


def released(folder, domain: str) -> dict:
    with gzip.open(folder / "esft" / "expert_scores" / f"{domain}_summary.json.gz", "rt") as file:
        return json.load(file)


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_released_scores_give_the_released_config_byte_for_byte(real_data, domain):
    scores = scores_of(released(real_data, domain), "token")
    made = expert_config(select_experts(scores, 0.2))
    text = (real_data / "esft" / "expert_configs" / f"{domain}.json").read_text()
    want = json.loads(text)
    assert len(want["experts"]) == 26
    assert all(made["experts"][layer] == experts for layer, experts in want["experts"].items())
    assert json.dumps(made) == text.strip()


def test_real_routing_gives_the_released_averages(real_data):
    """The kept tokens are about half of the source: what they add up to bounds its average.

    With n of N tokens kept, the released average lies between n / N times ours and that plus the
    most that the other N - n tokens can add; both within the rounding to 4 digits. Scores that
    are divided by the layer's sum break the bound: gates of a token's top 6 sum to less than 1.
    """
    path = real_data / "esft" / "routing" / "intent_routing.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
    summaries = released(real_data, "intent")
    for kind, most, near in (("gate", 1.0, 0.006), ("token", 1 / 6, 0.012)):
        want = scores_of(summaries, kind)
        assert sorted(want) == list(range(1, 27))
        for layer, theirs in want.items():
            rows = table[table[:, 0] == layer]
            ours = totals(rows[:, 3:9], rows[:, 9:15] / 1e4, 64).scores(kind)
            share = len(rows) / SOURCE_TOKENS
            assert (theirs > share * ours - 1e-4).all(), (kind, layer)
            assert (theirs < share * ours + (1 - share) * most + 1e-4).all(), (kind, layer)
            np.testing.assert_allclose(ours, theirs, atol=near, err_msg=f"{kind} {layer}")
            assert np.corrcoef(ours, theirs)[0, 1] > 0.97, (kind, layer)
