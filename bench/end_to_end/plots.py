"""Plot of a server under load: output tokens/s by requests at once, the peer's, and the limit."""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, COLORS = "#1f77b4", ("#d95f02", "#7a7a7a", "#2ca02c")


def rates(result: dict[str, Any], case: str) -> dict[int, float]:
    """Return concurrency -> output tokens/s, the median of the repeats that were answered."""
    results: dict[int, list[float]] = {}
    for row in result["rows"]:
        if row["case"] == case and not row.get("error"):
            results.setdefault(row["concurrency"], []).append(row["output_throughput"])
    return {at_once: statistics.median(own) for at_once, own in sorted(results.items())}


def peers_of(result: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return other servers' results of the same model and device that lie in a folder."""
    others = [json.loads(file.read_text()) for file in sorted(folder.glob("end_to_end_*.json"))]
    same = ("model", "device")
    return [
        other
        for other in others
        if other["server"] != result["server"] and all(other[k] == result[k] for k in same)
    ]


def plot_end_to_end(result: dict[str, Any], path: Path) -> None:
    """Draw a panel for each case that was answered, and write a PNG to `path`.

    Nothing is written where all rows are prompts with one token of answer.
    """
    cases = list(dict.fromkeys(row["case"] for row in result["rows"] if row["case"] != "prompts"))
    cases = [case for case in cases if rates(result, case)]
    if not cases:
        return
    peers = peers_of(result, path.parent)
    fig, axes = plt.subplots(1, len(cases), figsize=(4.2 * len(cases), 3.6), squeeze=False)
    shown = {}
    for ax, case in zip(axes[0], cases, strict=True):
        _draw(ax, result, peers, case)
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    fig.suptitle(f"{result['model']}, random weights, {result['device']}", fontsize=9)
    fig.legend(shown.values(), shown, loc="lower center", ncol=3, fontsize=7, frameon=False)
    fig.tight_layout(rect=(0, 0.08, 1, 0.98))
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _draw(ax: Axes, result: dict[str, Any], peers: list[dict[str, Any]], case: str) -> None:
    ours = rates(result, case)
    ax.plot(list(ours), list(ours.values()), "o-", color=OURS, label=result["server"])
    for other, color in zip(peers, COLORS, strict=False):
        if theirs := rates(other, case):
            label = f"{other['server']} ({other['date']})"
            ax.plot(list(theirs), list(theirs.values()), "s--", color=color, label=label)
    limits = {
        limit["concurrency"]: limit["tokens_per_s"]
        for limit in result.get("limits", ())
        if limit["case"] == case
    }
    if limits:
        label = "physical limit without adapters: bytes of a step, FLOPs of prompts"
        ax.plot(list(limits), list(limits.values()), color="black", lw=0.9, label=label)
    ticks = sorted({*ours, *limits})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xlabel("requests at once")
    ax.set_ylabel("output tokens / s")
    ax.set_title("no adapter" if case == "base" else case, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
