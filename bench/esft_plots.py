"""Plot of what `python -m bench.esft_speed` measured."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.esft_table import rows_by_batch

BAR_PERCENT = 2  # that the same experts may cost more with adapters
OURS, FLOOR, BAR = "#1f77b4", "#aec7e8", "#d62728"


def plot_esft_speed(result: dict[str, Any], path: Path) -> None:
    """Draw steps over the base's, their parts, steps over their bytes, loads; to a PNG `path`."""
    fig, axes = plt.subplots(1, 4, figsize=(15, 3.8))
    _plot_same(axes[0], rows_by_batch(result["rows"], "same"))
    _plot_parts(axes[1], result["rows"])
    _plot_own(axes[2], rows_by_batch(result["rows"], "own"))
    _plot_loads(axes[3], result["rows"])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        handles, labels = ax.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        if unique:
            ax.legend(unique.values(), unique.keys(), fontsize=7, frameon=False)
    fig.suptitle(
        f"ESFT adapters of {result['model']}, {result['layers']} layers of experts; "
        f"{result['device']}, {result['date']}, copy {result['copy_tb_per_s']:.2f} TB/s",
        fontsize=9,
    )
    fig.tight_layout()
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _plot_same(ax: Axes, batches: dict[str, list[tuple[int, dict]]]) -> None:
    for batch, points in batches.items():
        over, sides = zip(*(_over(row) for _, row in points), strict=True)
        sides = list(zip(*sides, strict=True))
        ax.errorbar([n for n, _ in points], over, sides, marker="o", ms=3, capsize=2, label=batch)
    ax.axhline(BAR_PERCENT, color=BAR, lw=1, ls="--", label=f"bar {BAR_PERCENT}%")
    ax.set(xlabel="adapters in the batch", ylabel="over the base alone, %", title="same experts")
    ax.set_ylim(-2 * BAR_PERCENT, 4 * BAR_PERCENT)  # room for the legend; long intervals go on


def _over(row: dict) -> tuple[float, tuple[float, float]]:
    """Return by how many percent a step takes longer, and how far its interval goes down and up."""
    more, over = row["more"], 100 * (row["us"] / row["base_us"] - 1)
    over = more.get("over %", over)
    return over, (over - more.get("low %", over), more.get("high %", over) - over)


def _plot_parts(ax: Axes, rows: list[dict]) -> None:
    """Draw rerouting, fused and plain, over the base, and virtual tensors over padded ones."""
    parts = [row for row in rows if row["name"].startswith(("rerouting", "virtual"))]
    for i, row in enumerate(parts):
        over, sides = _over(row)
        kind = row["name"].partition(", ")[0]
        color = {"rerouting fused": OURS, "rerouting plain": FLOOR}.get(kind, "#9a9a9a")
        ax.bar(i, over, 0.7, yerr=[[side] for side in sides], capsize=3, color=color, label=kind)
    ax.axhline(0, color="black", lw=0.8)
    names = [row["name"].partition(", ")[2].replace(", ", "\n") for row in parts]
    ax.set_xticks(range(len(parts)), names, fontsize=6, rotation=45, ha="right")
    ax.set(ylabel="over the base alone (grey: over padded), %", title="its parts")


def _plot_own(ax: Axes, batches: dict[str, list[tuple[int, dict]]]) -> None:
    """Draw measured over base and floor over base: what more distinct experts cost."""
    for i, (batch, points) in enumerate(batches.items()):
        took = [row["us"] / row["base_us"] for _, row in points]
        floor = [row["floor_us"] / row["base_floor_us"] for _, row in points]
        color = f"C{i}"
        ax.plot([n for n, _ in points], took, marker="o", ms=3, color=color, label=batch)
        ax.plot([n for n, _ in points], floor, ls=":", color=color, label="its bytes")
    ax.set(xlabel="adapters in the batch", ylabel="times the base", title="own experts")


def _plot_loads(ax: Axes, rows: list[dict]) -> None:
    loads = [row for row in rows if row["name"].startswith("load ")]
    for i, row in enumerate(loads):
        size = f"{row['more']['GB']:.2f} GB"
        ax.bar(i - 0.2, row["us"] / 1e3, 0.38, color=OURS, label=f"{size} to first use")
        ax.bar(i + 0.2, row["base_us"] / 1e3, 0.38, color=FLOOR, label="its bytes alone")
    names = [row["name"].removeprefix("load from ").removesuffix(" to first use") for row in loads]
    ax.set_xticks(range(len(loads)), names, fontsize=7)
    ax.set(ylabel="ms", title="one adapter's load", yscale="log" if loads else "linear")
