"""Plots of `python -m bench.vision`: the applications as V-LoRA's figures, heads, frames."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"unmerged": "#9a9a9a", "merged": "#d95f02", "dlora": "#7570b3", "ours": "#1f77b4"}
NAMES = {
    "unmerged": "never merged, as S-LoRA and Punica",
    "merged": "top adapter always merged",
    "dlora": "merged or plain, as dLoRA",
    "ours": "merged, plain or mixed (lora-jax, auto)",
}
# sweep, title, axis, measure
PANELS = (
    ("rate", "retrieval (figure 14)", "requests / s", "latency_ms"),
    ("streams", "analytics (figures 14, 16)", "streams", "latency_ms"),
    ("skew", "retrieval (figures 19, 22)", "share of the top adapter", "latency_ms"),
    (
        "others",
        "rows of other adapters (figure 20)",
        "requests for other adapters, of 8",
        "processor_ms_per_request",
    ),
    ("two adapters", "requests for two adapters (figure 21)", "policy", "latency_ms"),
    ("at once", "16 requests at once (Table 3)", "policy", "requests_per_s"),
)
UNITS = {
    "latency_ms": "mean latency, ms",
    "processor_ms_per_request": "processor time of a request, ms",
    "requests_per_s": "requests / s",
}


def plot_applications(result: dict[str, Any], path: Path) -> None:
    """Draw one panel for each sweep, a line or bar for each policy."""
    fig, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained")
    shown: dict[str, Any] = {}
    for ax, (sweep, title, axis, measure) in zip(axes.flat, PANELS, strict=True):
        rows = [row for row in result["rows"] if row["sweep"] == sweep]
        lines = list(dict.fromkeys((row["policy"], row["answered_by"]) for row in rows))
        for at, (policy, way) in enumerate(lines):
            points = [row for row in rows if (row["policy"], row["answered_by"]) == (policy, way)]
            label = NAMES[policy] + (", task head" if way == "head" else "")
            x, y = [row["value"] for row in points], [row[measure] for row in points]
            if len(points) > 1:
                style = "--" if way == "head" else "-"
                shown[label] = ax.plot(x, y, style, color=COLOURS[policy], marker="o", ms=3)[0]
                ax.set_xticks(x)
            else:
                ax.bar_label(ax.bar(at, y, color=COLOURS[policy]), fmt="%.4g", fontsize=7)
                ax.set_xticks([])
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(axis, fontsize=8)
        ax.set_ylabel(UNITS[measure], fontsize=8)
        ax.set_ylim(bottom=0)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    fig.legend(shown.values(), shown, loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    fig.suptitle(
        f"Policies of V-LoRA's figures on tiny-vl, {result['device']}, {result['date']}", fontsize=9
    )
    fig.savefig(path, dpi=110)
    plt.close(fig)


def plot_heads(result: dict[str, Any], path: Path) -> None:
    """Draw the latency of a label by the task head and by the LM head, as in figure 16."""
    labels = {"task_head_ms": "task head", "lm_head_ms": f"{result['answer_tokens']} tokens"}
    bars = {label: result[key] for key, label in labels.items()}
    title = f"a label of one image, {result['times_less']:.2f} times less by the head"
    _plot_bars(result, bars, title, path)


def plot_frames(result: dict[str, Any], path: Path) -> None:
    """Draw the time to the first token, of the tower, and of its products at the dense peak."""
    names = {"ttft_ms": "first token", "tower_ms": "tower", "tower_floor_ms": "tower's products"}
    bars = {name: result[key] for key, name in names.items() if key in result}
    title = f"an image of 1080 x 1920; {result['tokens_per_s']:.0f} tokens/s of four at once"
    _plot_bars(result, bars, title, path)


def _plot_bars(result: dict[str, Any], bars: dict[str, float], title: str, path: Path) -> None:
    fig, ax = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    colours = [COLOURS["ours"], COLOURS["unmerged"], COLOURS["merged"]][: len(bars)]
    ax.bar_label(ax.bar(list(bars), list(bars.values()), color=colours), fmt="%.1f", fontsize=8)
    ax.set_ylabel("ms")
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(f"{title}\n{result['device']}, {result['date']}", fontsize=8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


PLOTS = {"applications": plot_applications, "heads": plot_heads, "frames": plot_frames}
