"""Plots of exchanges between devices, and of servers under load."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

# One way over the links of a Hopper GPU, by NVIDIA's datasheets.
LINK_BYTES_PER_US = 450e3
COLORS = ("#1f77b4", "#d62728", "#2ca02c")
LINES = {
    "nccl_graph_us": ("NCCL in the CUDA graph", "#9a9a9a"),
    "nccl_us": ("NCCL without a CUDA graph", "#aec7e8"),
    "ours_us": ("lora-jax, in the CUDA graph", "#1f77b4"),
}


def plot_exchange(result: dict[str, Any], path: Path) -> None:
    """Draw the time of an exchange by the size of its result, and write a PNG to `path`."""
    rows = result["rows"]
    sizes = [row["kilobytes"] for row in rows]
    fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for key, (label, color) in LINES.items():
        ax.plot(sizes, [row[key] for row in rows], "o-", color=color, label=label)
    limit = [_limit_us(row) for row in rows]
    ax.plot(sizes, limit, "--", color="black", label="physical limit: bandwidth of the links")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.set_xlabel("result on each GPU, KB")
    ax.set_ylabel("us per exchange")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    devices = rows[0]["devices"]
    ax.set_title(f"all-gather, {devices} x {result['device']}, {result['date']}", fontsize=9)
    fig.savefig(path, dpi=130)
    plt.close(fig)


PANELS = {
    "ttft": "time to the first token, ms",
    "between_tokens": "between two tokens, ms",
    "output_tokens_per_s": "output tokens/s",
}


def plot_cluster(result: dict[str, Any], path: Path) -> None:
    """Draw medians and 99th percentiles of each system by rate, and write a PNG to `path`."""
    loads = result["rows"]["loads"]
    fig, axes = plt.subplots(1, len(PANELS), figsize=(10, 3.2), layout="constrained")
    for system, color in zip(dict.fromkeys(r["system"] for r in loads), COLORS, strict=False):
        rows = [row for row in loads if row["system"] == system]
        rates = [row["rate"] for row in rows]
        for ax, (key, label) in zip(axes, PANELS.items(), strict=True):
            lines = {"": "-"} if key in rows[0] else {"_p50_ms": "-", "_p99_ms": ":"}
            for ending, style in lines.items():
                name = system if style == "-" else f"{system}, 99th percentile"
                ys = [row[key + ending] for row in rows]
                ax.plot(rates, ys, style, marker="o", color=color, label=name)
            ax.set_xlabel("requests/s")
            ax.set_ylabel(label)
            ax.spines[["top", "right"]].set_visible(False)
            ax.set_ylim(bottom=0)
    axes[0].legend(fontsize=7, frameon=False)
    said = f"{result['model']}, {result['layers']} layers, {result['device']}, {result['date']}"
    fig.suptitle(said, fontsize=9)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _limit_us(row: dict[str, Any]) -> float:
    """Return the time in which the links bring what a device lacks of the result."""
    lacking = row["kilobytes"] * 1024 * (row["devices"] - 1) / row["devices"]
    return lacking / LINK_BYTES_PER_US
