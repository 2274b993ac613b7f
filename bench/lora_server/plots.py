"""The plot of what `python -m bench.lora_server` measured."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.lora_server.plans import PLANS

PARTS = {"receive": "#aec7e8", "lora": "#1f77b4", "send": "#9ecae1"}
PAPER_US, BAR_US = 494, 250  # receive + LoRA + send, EP4 and 128 tokens
EXPOSED_SHARE = 0.1  # of the base's time, at most
GREY, RED = "#9a9a9a", "#d62728"


def plot_lora_server(result: dict[str, Any], path: Path) -> None:
    """Write one PNG: the exchange's parts (InfiniLoRA, Table 4), and layers with it behind them."""
    rows = [row for row in result["rows"] if "overlap" in row][::-1]
    alone = [row for row in rows if "receive" in row and PLANS[row["plan"]].senders == 1]
    height = 0.3 * len(rows) + 1.2
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, height), gridspec_kw={"wspace": 1.0})
    _plot_parts(left, alone)
    _plot_layers(right, rows)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=7, frameon=False, ncol=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    fig.suptitle(f"{result['shape']}; {result['device']}, {result['date']}", fontsize=9, y=0.98)
    fig.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(fig)


def _plot_parts(ax: Axes, rows: list[dict]) -> None:
    for place, row in enumerate(rows):
        end = 0.0
        for part, color in PARTS.items():
            label = part if place == 0 else None
            ax.barh(place, row[part], left=end, height=0.6, color=color, label=label)
            end += row[part]
        ax.text(end, place, f" {end:.0f}", va="center", fontsize=7)
    ax.axvline(PAPER_US, color=GREY, ls="--", lw=1, label="InfiniLoRA, EP4-PP2, 128 tokens")
    ax.axvline(BAR_US, color=RED, lw=1, label="bar for EP4, 128 tokens")
    _name(ax, rows, "microseconds of a layer's exchanges")


def _plot_layers(ax: Axes, rows: list[dict]) -> None:
    for place, row in enumerate(rows):
        base, exposed = row["base"], max(row["exposed"], 0.0)
        named = {"base": "base", "exposed": "left beside it"} if place == 0 else {}
        ax.barh(place, base, height=0.6, color=GREY, label=named.get("base"))
        ax.barh(
            place, exposed, left=base, height=0.6, color=RED, alpha=0.6, label=named.get("exposed")
        )
        share = f" {100 * row['exposed_share']:.1f}%"
        ax.text(base + exposed, place, share, va="center", fontsize=7)
        bar, label = base * (1 + EXPOSED_SHARE), "bar" if place == 0 else None
        ax.plot([bar] * 2, [place - 0.4, place + 0.4], color="black", lw=1, label=label)
    _name(ax, rows, "microseconds of a layer, base and exchanges")


def _name(ax: Axes, rows: list[dict], title: str) -> None:
    ax.set_yticks(range(len(rows)))
    names = [f"{r['plan']}; {r['batch']} tokens, {r.get('adapters', 256)} adapters" for r in rows]
    ax.set_yticklabels(names, fontsize=7)
    ax.set_xlabel(title, fontsize=8)
