"""Plot of the results of `python -m bench.lora_server`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.lora_server.plans import PLANS

PARTS = {
    "receive": ("send rows to the server", "#aec7e8"),
    "lora": ("LoRA on the server", "#1f77b4"),
    "send": ("send deltas back", "#6baed6"),
}
PAPER_US = 494  # receive + LoRA + send, EP4-PP2, 128 tokens
MOST_ROWS = 12  # the rest is in the JSON and in docs/benchmarks/lora-server.md
GREY, ADDED = "#9a9a9a", "#d95f02"


def plot_lora_server(result: dict[str, Any], path: Path) -> None:
    """Write one PNG: the exchange's parts (InfiniLoRA, Table 4), and layers with it behind them."""
    rows = _shown(result["rows"])
    size = (9.5, 0.32 * len(rows) + 1.6)
    fig, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    _plot_parts(left, rows)
    _plot_layers(right, rows)
    names = [f"{row['plan']}, {row['batch']} tokens" for row in rows]
    left.set_yticks(range(len(rows)), names, fontsize=8)
    left.invert_yaxis()
    shown = {}
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    fig.legend(shown.values(), shown, loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    title = f"{result['shape']}, 256 adapters; {result['device']}, {result['date']}"
    fig.suptitle(title, fontsize=9)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _shown(rows: list[dict]) -> list[dict]:
    """Return the rows of one instance, 256 adapters and rows as they are, twelve at most."""
    whole = [row for row in rows if "overlap" in row and "receive" in row]
    whole = [row for row in whole if PLANS[row["plan"]].senders == 1]
    return [
        row for row in whole if row.get("adapters", 256) == 256 and "all rows" not in row["plan"]
    ][:MOST_ROWS]


def _plot_parts(ax: Axes, rows: list[dict]) -> None:
    for place, row in enumerate(rows):
        end = 0.0
        for part, (label, color) in PARTS.items():
            ax.barh(place, row[part], left=end, height=0.6, color=color, label=label)
            end += row[part]
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(end + 8, place, f"{end:.0f}", va="center", fontsize=8, bbox=box)
    label = "InfiniLoRA (paper), EP4-PP2, 128 tokens, InfiniBand"
    ax.axvline(PAPER_US, color="black", ls="--", lw=1, zorder=0, label=label)
    ax.set_xlabel("exchange of a layer, us", fontsize=8)


def _plot_layers(ax: Axes, rows: list[dict]) -> None:
    for place, row in enumerate(rows):
        base, added = row["base"], max(row["exposed"], 0.0)
        ax.barh(place, base, height=0.6, color=GREY, label="base layer alone")
        ax.barh(place, added, left=base, height=0.6, color=ADDED, label="added by the exchange")
        share = f"+{100 * row['exposed_share']:.1f}%"
        ax.text(base + added + 8, place, share, va="center", fontsize=8)
    ax.set_xlabel("layer with its exchange, us", fontsize=8)
    ax.set_xlim(right=1.2 * max(row["overlap"] for row in rows))
