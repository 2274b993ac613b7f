"""Plots of exchanges between devices."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

# One way over the links of a Hopper GPU, by NVIDIA's datasheets.
LINK_BYTES_PER_US = 450e3
LINES = {
    "nccl_graph_us": ("NCCL in the CUDA graph", "#9a9a9a"),
    "nccl_us": ("NCCL, outside of it", "#aec7e8"),
    "ours_us": ("lora-jax, in the CUDA graph", "#1f77b4"),
}


def plot_exchange(result: dict[str, Any], path: Path) -> None:
    """Draw the time of an exchange by the size of its result, and write a PNG to `path`."""
    rows = result["rows"]
    sizes = [row["kilobytes"] for row in rows]
    fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for key, (label, color) in LINES.items():
        ax.plot(sizes, [row[key] for row in rows], "o-", color=color, label=label)
    ax.plot(sizes, [_floor_us(row) for row in rows], "--", color="black", label="floor: the links")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_xlabel("result on each GPU, KB")
    ax.set_ylabel("us per exchange")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    devices = rows[0]["devices"]
    ax.set_title(f"all-gather, {devices} x {result['device']}, {result['date']}", fontsize=9)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _floor_us(row: dict[str, Any]) -> float:
    """Return the time in which the links bring what a device lacks of the result."""
    lacking = row["kilobytes"] * 1024 * (row["devices"] - 1) / row["devices"]
    return lacking / LINK_BYTES_PER_US
