"""Relevance scores of experts for a text, and the choice by a threshold. No jax.

Expert-specialised fine-tuning (ESFT, arXiv 2407.01906) has two scores of an expert on a text. With
g[t, e] the router's gate, 0 where expert e is not among token t's top k:

    gate score   (1 / tokens) sum_t g[t, e]              "average gate score"
    token score  (1 / tokens) sum_t (g[t, e] > 0) / k    "token selection ratio"

In each layer the experts of the highest scores are trained, as few as reach the sum `top_p`.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

KINDS = ("token", "gate")
Scores = dict[int, np.ndarray]  # float [experts] by layer, counted from the first of the model
Selection = dict[int, tuple[int, ...]]  # by layer: experts, best first
CONFIG_FILE = "expert_cfg.json"


class RoutingTotals:
    """Statistics of one layer's router over a text so far: sums over its tokens, per expert."""

    def __init__(self, num_experts: int):
        self.gates = np.zeros(num_experts, np.float64)
        self.choices = np.zeros(num_experts, np.int64)
        self.tokens = 0

    def add(self, ids: np.ndarray, gates: np.ndarray) -> None:
        """Count some tokens' experts in: int [tokens, k] and float [tokens, k].

        Raises ValueError for other shapes, or an expert that is not one of the layer's.
        """
        if ids.ndim != 2 or ids.shape != gates.shape:
            raise ValueError(f"experts {ids.shape} and gates {gates.shape} must be [tokens, k]")
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self.gates):
            raise ValueError(f"experts {ids.min()} to {ids.max()} of a layer of {len(self.gates)}")
        np.add.at(self.gates, ids, gates)
        np.add.at(self.choices, ids, 1)
        self.tokens += len(ids)

    def scores(self, kind: str) -> np.ndarray:
        """Return every expert's score, float64 [experts].

        "token" scores sum to 1, "gate" scores to the mean of what a token's top k gates sum to: a
        gate's mean is over all tokens of the text and is not divided by the layer's sum.
        """
        if kind not in KINDS:
            raise ValueError(f"score {kind!r} is not one of {', '.join(KINDS)}")
        if not self.tokens:
            raise ValueError("no token was routed: there is nothing to score")
        if kind == "gate":
            return self.gates / self.tokens
        return self.choices / self.choices.sum()


def select_experts(scores: Scores, top_p: float) -> Selection:
    """Return, per layer, the experts of falling score until their scores sum to `top_p` or more.

    Of equal scores the lower number comes first. Where the sum of all stays below top_p (gate
    scores may), all are chosen. Raises ValueError for a top_p that is not in (0, 1].
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} is not above 0 and at most 1")
    chosen: Selection = {}
    for layer, values in scores.items():
        order = np.argsort(-values, kind="stable")
        below = np.cumsum(values[order]) < top_p  # the expert that reaches top_p is chosen too
        count = int(below.sum()) + 1
        chosen[layer] = tuple(int(expert) for expert in order[:count])
    return chosen


def summary(totals: Mapping[int, RoutingTotals]) -> dict[str, Any]:
    """Return both scores in the form of ESFT's summary.json: kind_scores[layer][expert]."""
    return {
        f"{kind}_scores": {
            str(layer): {str(e): float(s) for e, s in enumerate(total.scores(kind))}
            for layer, total in totals.items()
        }
        for kind in KINDS
    }


def expert_config(selection: Selection) -> dict[str, Any]:
    """Return expert_cfg.json of an adapter that replaces these experts and nothing else."""
    return {
        "experts": {str(layer): list(experts) for layer, experts in selection.items()},
        "shared_experts": False,
        "non_expert_modules": False,
    }


def write_config(folder: pathlib.Path, selection: Selection) -> None:
    """Write FOLDER/expert_cfg.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(expert_config(selection)) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
