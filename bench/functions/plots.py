"""Figures 2 and 7 to 15 of ServerlessLoRA (arXiv 2505.14468), drawn from simulated runs.

Baselines are models of an idea, as their labels say. Figure 13 is the switches and Table 2.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

CLASSES = ("predictable", "normal", "bursty")
COLOURS = ("#1f77b4", "#d95f02", "#e6ab02", "#9a9a9a", "#7570b3")


def plot_functions(result: dict[str, Any], path: Path) -> None:
    """Draw one panel for each figure, a colour for each system, and write a PNG to `path`."""
    rows = result["simulated"]
    fig, axes = plt.subplots(4, 3, figsize=(12, 13), layout="constrained")
    names = [row["system"] for row in rows["normal"]]
    _bars(axes[0, 0], rows, names, "mean_ttft_s", "figure 7: mean TTFT, s")
    _bars(axes[0, 1], rows, names, "mean_tpot_s", "figure 8: mean TPOT, s")
    _parts(axes[0, 2], rows["normal"])
    _bars(axes[1, 0], rows, names, "cost_effectiveness", "figure 10: 1 / (latency x cost)")
    for name, colour in zip(names, COLOURS, strict=True):
        points = [row for row in rows["load"] if row["system"] == name]
        x, y = [p["mean_e2e_s"] for p in points], [p["dollars"] for p in points]
        axes[1, 1].plot(x, y, "o-", color=colour, ms=3, lw=1)
        points = [row for row in rows["memory"] if row["system"] == name]
        if points:
            x, y = [p["device_gb"] for p in points], [p["mean_ttft_s"] for p in points]
            axes[2, 1].plot(x, y, "o-", color=colour, ms=3, lw=1)
    _say(axes[1, 1], "figure 11: cost by latency, loads of 1/8 to 1", "mean end to end, s", "$")
    _say(axes[2, 1], "figure 14: by memory of a device", "GB", "mean TTFT, s")
    for at, row in enumerate(rows["large"]):
        axes[1, 2].plot(row["mean_e2e_s"], row["dollars"], "o", color=COLOURS[at])
    _say(axes[1, 2], "figure 12: 70B, Azure LLM trace", "mean end to end, s", "$")
    labels = [row["system"] for row in rows["switches"]]
    axes[2, 0].barh(labels, [row["dollars"] for row in rows["switches"]], color=COLOURS[0])
    axes[2, 0].tick_params(labelsize=6)
    _say(axes[2, 0], "figure 13: switches", "$", "")
    for at, row in enumerate(rows["normal"]):
        quantiles = row["ttft_quantiles_s"]
        shares = [step / (len(quantiles) - 1) for step in range(len(quantiles))]
        axes[2, 2].plot(quantiles, shares, color=COLOURS[at], lw=1)
    axes[2, 2].set_xscale("log")
    _say(axes[2, 2], 'figure 15: TTFT, "normal"', "s", "share of requests")
    for at, count in enumerate(sorted({row["functions"] for row in rows["one_and_four"]})):
        own = [row for row in rows["one_and_four"] if row["functions"] == count]
        base = next(r for r in own if r["system"].endswith("engine per adapter"))
        shares = [row["cost_effectiveness"] / base["cost_effectiveness"] for row in own]
        axes[3, at].bar(range(len(own)), shares, color=COLOURS)
        axes[3, at].set_xticks([])
        _say(
            axes[3, at],
            f"figure 2{'ab'[at]}: {count} of 7B, cost-effectiveness",
            "",
            "of an engine",
        )
    axes[3, 2].axis("off")
    handles = [Line2D([], [], color=c, marker="o", ls="") for c in COLOURS]
    fig.legend(handles, names, loc="outside lower center", ncol=3, fontsize=7, frameon=False)
    fig.suptitle(f"Simulated, {result['date']}: {result['command']}", fontsize=9)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _bars(ax: Any, rows: dict[str, Any], names: list[str], measure: str, title: str) -> None:
    for at, kind in enumerate(CLASSES):
        for number, row in enumerate(rows[kind]):
            ax.bar(at + 0.16 * (number - 2), row[measure], 0.15, color=COLOURS[number])
    ax.set_xticks(range(len(CLASSES)), CLASSES, fontsize=7)
    ax.set_yscale("log")
    _say(ax, title, "", "")
    assert len(names) == len(COLOURS), "a colour for each system"


def _parts(ax: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the seconds of all requests by what they went to."""
    bottoms = [0.0] * len(rows)
    for part, shade in zip(rows[0]["seconds_by_part"], (0.2, 0.4, 0.6, 0.8, 1.0), strict=True):
        values = [row["seconds_by_part"][part] for row in rows]
        ax.bar(range(len(rows)), values, 0.7, bottoms, color="#1f77b4", alpha=shade, label=part)
        bottoms = [a + b for a, b in zip(bottoms, values, strict=True)]
    ax.set_xticks([])
    ax.legend(fontsize=6, frameon=False)
    _say(ax, 'figure 9: seconds of all requests, "normal"', "", "")


def _say(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=8)
    ax.set_xlabel(x, fontsize=7)
    ax.set_ylabel(y, fontsize=7)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
