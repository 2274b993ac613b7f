"""Figures 2 and 7 to 15 of ServerlessLoRA (arXiv 2505.14468), drawn from simulated runs.

Baselines are models of an idea, as their labels say.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

CLASSES = ("predictable", "normal", "bursty")
LATENCY, COST = "mean time of a request, s", "cost of all requests, $"
COLOURS = ("#1f77b4", "#d95f02", "#e6ab02", "#9a9a9a", "#7570b3")


def plot_functions(result: dict[str, Any], path: Path) -> None:
    """Draw one panel for each figure, a colour for each system, and write a PNG to `path`."""
    rows = result["simulated"]
    fig, axes = plt.subplots(4, 3, figsize=(12, 13), layout="constrained")
    names = [row["system"] for row in rows["normal"]]
    _bars(axes[0, 0], rows, names, "mean_ttft_s", "time to first token, mean, s (figure 7)")
    _bars(axes[0, 1], rows, names, "mean_tpot_s", "time per output token, mean, s (figure 8)")
    _parts(axes[0, 2], rows["normal"])
    _bars(axes[1, 0], rows, names, "cost_effectiveness", "1 / (latency, s x cost, $) (figure 10)")
    for name, colour in zip(names, COLOURS, strict=True):
        points = [row for row in rows["load"] if row["system"] == name]
        x, y = [p["mean_e2e_s"] for p in points], [p["dollars"] for p in points]
        axes[1, 1].plot(x, y, "o-", color=colour, ms=3, lw=1)
        points = [row for row in rows["memory"] if row["system"] == name]
        if points:
            x, y = [p["device_gb"] for p in points], [p["mean_ttft_s"] for p in points]
            axes[2, 1].plot(x, y, "o-", color=colour, ms=3, lw=1)
    _say(axes[1, 1], "cost by latency, loads of 1/8 to 1 (figure 11)", LATENCY, COST)
    _say(axes[2, 1], "memory of a device (figure 14)", "GB", "time to first token, mean, s")
    for at, row in enumerate(rows["large"]):
        axes[1, 2].plot(row["mean_e2e_s"], row["dollars"], "o", color=COLOURS[at])
    _say(axes[1, 2], "70B model, Azure LLM trace (figure 12)", LATENCY, COST)
    labels = [row["system"].replace("functions", "all parts") for row in rows["switches"]]
    axes[2, 0].barh(labels, [row["dollars"] for row in rows["switches"]], color=COLOURS[0])
    axes[2, 0].tick_params(labelsize=6)
    _say(axes[2, 0], "lora-jax without one part (figure 13, Table 2)", COST, "")
    for at, row in enumerate(rows["normal"]):
        quantiles = row["ttft_quantiles_s"]
        shares = [step / (len(quantiles) - 1) for step in range(len(quantiles))]
        axes[2, 2].plot(quantiles, shares, color=COLOURS[at], lw=1)
    axes[2, 2].set_xscale("log")
    axes[2, 2].xaxis.set_major_formatter("{x:g}")
    _say(axes[2, 2], 'load "normal" (figure 15)', "time to first token, s", "share of requests")
    for at, count in enumerate(sorted({row["functions"] for row in rows["one_and_four"]})):
        own = [row for row in rows["one_and_four"] if row["functions"] == count]
        base = next(r for r in own if r["system"].endswith("engine per adapter"))
        shares = [row["cost_effectiveness"] / base["cost_effectiveness"] for row in own]
        axes[3, at].bar(range(len(own)), shares, color=COLOURS)
        axes[3, at].set_xticks([])
        _say(
            axes[3, at],
            f"{count} function{'s' if count > 1 else ''} of a 7B model (figure 2{'ab'[at]})",
            "",
            "1 / (latency x cost), engine per adapter = 1",
        )
    axes[3, 2].axis("off")
    handles = [Line2D([], [], color=c, marker="o", ls="") for c in COLOURS]
    fig.legend(
        handles,
        [_label(n) for n in names],
        loc="outside lower center",
        ncol=3,
        fontsize=7,
        frameon=False,
    )
    fig.suptitle(
        f"ServerlessLoRA's figures, simulated {result['date']} by {result['command']}", fontsize=9
    )
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _bars(ax: Any, rows: dict[str, Any], names: list[str], measure: str, title: str) -> None:
    for at, kind in enumerate(CLASSES):
        for number, row in enumerate(rows[kind]):
            ax.bar(at + 0.16 * (number - 2), row[measure], 0.15, color=COLOURS[number])
    ax.set_xticks(range(len(CLASSES)), CLASSES, fontsize=7)
    values = [row[measure] for kind in CLASSES for row in rows[kind]]
    if max(values) > 10 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
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
    _say(ax, 'seconds of all requests, load "normal" (figure 9)', "", "")


def _label(system: str) -> str:
    """Return the name of a system for readers: ours first, a baseline as the model that it is."""
    if system == "functions":
        return "lora-jax: functions over one backbone"
    return system.removeprefix("model of ") + " (model)"


def _say(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=8)
    ax.set_xlabel(x, fontsize=7)
    ax.set_ylabel(y, fontsize=7)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)
