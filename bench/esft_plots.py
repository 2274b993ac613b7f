"""Plot of the results of `python -m bench.esft_speed`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.esft_table import rows_by_batch

OURS, LIGHT, GREY = "#1f77b4", "#aec7e8", "#9a9a9a"
PARTS = {
    "rerouting fused": ("rerouting, as shipped, over the base", OURS),
    "rerouting plain": ("rerouting by plain operators, over the base", LIGHT),
}
ADAPTERS = (1, 5, 10, 20)  # ticks
PADDED = ("virtual tensors over padded ones", GREY)


def plot_esft_speed(result: dict[str, Any], path: Path) -> None:
    """Draw steps over the base's, their parts, steps beside their bytes, and loads."""
    fig, axes = plt.subplots(2, 2, figsize=(9.5, 7), layout="constrained")
    _plot_same(axes[0, 0], rows_by_batch(result["rows"], "same"))
    _plot_parts(axes[0, 1], result["rows"])
    _plot_own(axes[1, 0], rows_by_batch(result["rows"], "own"))
    _plot_loads(axes[1, 1], result["rows"])
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
        ax.title.set_fontsize(9)
        handles, labels = ax.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        if unique:
            ax.legend(unique.values(), unique.keys(), fontsize=7, frameon=False, loc="upper left")
    fig.suptitle(
        f"ESFT adapters of {result['model']}, {result['layers']} layers of experts; "
        f"{result['device']}, {result['date']}",
        fontsize=9,
    )
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _batch(name: str) -> str:
    return "decode, 1 row" if name == "decode, 1 rows" else name


def _plot_same(ax: Axes, batches: dict[str, list[tuple[int, dict]]]) -> None:
    for i, (batch, points) in enumerate(batches.items()):
        over, sides = zip(*(_over(row) for _, row in points), strict=True)
        sides, places = list(zip(*sides, strict=True)), [n + 0.15 * i for n, _ in points]
        label = _batch(batch)
        ax.errorbar(places, over, sides, marker="o", ms=3, capsize=2, lw=1, label=label)
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xlabel="adapters in the batch", ylabel="time over the base, %")
    ax.set(title="cost of rerouting: adapters with the base's own experts", xticks=ADAPTERS)
    ax.set_ylim(-4, 8)  # room for the legend; long intervals continue


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
        label, color = PARTS.get(row["name"].partition(", ")[0], PADDED)
        ax.bar(i, over, 0.7, yerr=[[side] for side in sides], capsize=3, color=color, label=label)
    ax.axhline(0, color="black", lw=0.8)
    names = [_batch(row["name"].partition(", ")[2]).replace(", ", "\n") for row in parts]
    ax.set_xticks(range(len(parts)), [name.replace(" tokens", "\ntokens") for name in names])
    ax.tick_params(axis="x", labelsize=7)
    ax.set(ylabel="difference in time, %", title="rerouting and virtual tensors")
    ax.set_ylim(top=9)


def _plot_own(ax: Axes, batches: dict[str, list[tuple[int, dict]]]) -> None:
    """Draw measured over base and limit over base: what more distinct experts cost."""
    for i, (batch, points) in enumerate(batches.items()):
        took = [row["us"] / row["base_us"] for _, row in points]
        limit = [row["floor_us"] / row["base_floor_us"] for _, row in points]
        color = f"C{i}"
        ax.plot([n for n, _ in points], took, marker="o", ms=3, color=color, label=_batch(batch))
        ax.plot([n for n, _ in points], limit, ls=":", color=color)
    ax.plot([], [], ":", color=GREY, label="bytes over the base's bytes")
    ax.set(xlabel="adapters in the batch", ylabel="time over the base's time")
    ax.set(title="adapters with experts of their own", xticks=ADAPTERS)


def _plot_loads(ax: Axes, rows: list[dict]) -> None:
    loads = [row for row in rows if row["name"].startswith("load ")]
    for i, row in enumerate(loads):
        size = f"{row['more']['GB']:.2f} GB"
        for at, key, color, label in (
            (i - 0.2, "us", OURS, f"{size}, to the end of its first step"),
            (i + 0.2, "base_us", GREY, "physical limit: its bytes alone"),
        ):
            ax.bar(at, row[key] / 1e3, 0.38, color=color, label=label)
            ax.text(at, row[key] / 1e3, f"{row[key] / 1e3:.0f}", ha="center", va="bottom", size=7)
    names = [row["name"].removeprefix("load from ").removesuffix(" to first use") for row in loads]
    ax.set_xticks(range(len(loads)), names)
    ax.set(ylabel="ms", title="loading one adapter, by where its bytes are")
