"""Plot of the applications of `python -m bench.vision`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, OTHERS = "#1f77b4", "#9a9a9a"


def plot_applications(result: dict[str, Any], path: Path) -> None:
    """Draw the mean latency of each application under each policy."""
    names = list(dict.fromkeys(row["application"] for row in result["rows"]))
    fig, axes = plt.subplots(1, len(names), figsize=(8, 3), layout="constrained", squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        rows = [row for row in result["rows"] if row["application"] == name]
        labels = [r["policy"] + (", head" if r["answered_by"] == "head" else "") for r in rows]
        colours = [OURS if row["policy"] == "ours" else OTHERS for row in rows]
        bars = ax.bar(labels, [row["latency_ms"] for row in rows], color=colours)
        ax.bar_label(bars, fmt="%.0f", fontsize=7)
        ax.set_title(name, fontsize=9)
        ax.set_ylabel("mean latency, ms", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(f"tiny-vl, {result['device']}, {result['date']}", fontsize=9)
    fig.savefig(path, dpi=120)
    plt.close(fig)
