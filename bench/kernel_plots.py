"""Plots of what `python -m bench.kernels` measured."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, FLOOR, PEER, BAR = "#1f77b4", "#aec7e8", "#9a9a9a", "#d62728"


def plot_kernels(result: dict[str, Any], path: Path) -> None:
    """Write one PNG of all points to `path`, and beside it those of the grid, if it was measured.

    NAME_phases.png is latency and bandwidth of shrink and expand by tokens (as InfiniLoRA's
    Figure 19), NAME_tokens.png the time of the pair by tokens (as V-LoRA's Figure 17).
    """
    _plot_points(result, path)
    grid = [row for row in result["rows"] if row.get("grid")]
    if grid:
        _plot_phases(result, grid, path.with_stem(path.stem + "_phases"))
        _plot_tokens(result, grid, path.with_stem(path.stem + "_tokens"))


def _plot_points(result: dict[str, Any], path: Path) -> None:
    """Draw microseconds of every point beside floor, peer and bar, and write a PNG to `path`."""
    rows = [r for r in result["rows"] if r["us"] > 0 and not r.get("grid")][::-1]
    fig, ax = plt.subplots(figsize=(8.5, 0.5 * len(rows) + 1.6))
    for i, row in enumerate(rows):
        ax.barh(i, row["us"], height=0.55, color="#1f77b4", label="lora-jax")
        ax.barh(i, row["floor_us"], height=0.55, color="#aec7e8", label="floor (copy bandwidth)")
        for key, color, label in (
            ("peer_us", "#9a9a9a", "best peer"),
            ("bar_us", "#d62728", "bar"),
        ):
            if row.get(key):
                ax.plot([row[key]] * 2, [i - 0.38, i + 0.38], color=color, lw=2, label=label)
        ax.text(row["us"] * 1.03, i, f"{row['us']:.0f}", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)))
    ax.set_yticklabels([row["name"] for row in rows], fontsize=8)
    ax.set_xscale("log")
    ax.set_xlabel("microseconds, cold L2")
    ax.set_title(
        f"Kernels on {result['device']}, {result['date']}, copy {result['copy_tb_per_s']:.2f} TB/s",
        fontsize=9,
    )
    ax.spines[["top", "right"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ax.legend(unique.values(), unique.keys(), fontsize=7, frameon=False, loc="lower right")
    fig.tight_layout()
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _by_tokens(grid: list[dict], op: str) -> list[dict]:
    """Return the points of 512 adapters by Zipf, rank 64, in order of tokens."""
    wanted = {"op": op, "popularity": "zipf", "rank": 64, "slots": 512}
    rows = [row for row in grid if all(row.get(k) == v for k, v in wanted.items())]
    return sorted(rows, key=lambda row: row["rows"])


def _plot_phases(result: dict[str, Any], grid: list[dict], path: Path) -> None:
    """Draw latency (solid) and bandwidth (dashed) of ours and of the best peer."""
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for ax, op in zip(axes, ("shrink", "expand"), strict=True):
        rows, right = _by_tokens(grid, op), ax.twinx()
        moved = {row["rows"]: row["floor_us"] * result["copy_tb_per_s"] for row in rows}
        for key, color, label in (("us", OURS, "lora-jax"), ("peer_us", PEER, "best peer")):
            points = [(row["rows"], row[key]) for row in rows if row.get(key)]
            tokens, times = zip(*points, strict=True)
            ax.plot(tokens, times, color=color, marker="o", ms=3, label=f"{label}, us")
            rates = [moved[n] / time for n, time in points]
            right.plot(tokens, rates, color=color, ls="--", label=f"{label}, TB/s")
        ax.plot(
            [r["rows"] for r in rows], [r["floor_us"] for r in rows], color=FLOOR, label="floor"
        )
        right.axhline(result["copy_tb_per_s"], color=BAR, lw=1, ls=":", label="copy bandwidth")
        right.set_ylim(0, 1.1 * result["copy_tb_per_s"])
        right.set_ylabel("TB/s (dashed)")
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=op)
        handles, labels = (a + b for a, b in zip(*map(_legend, (ax, right)), strict=True))
        ax.legend(handles, labels, fontsize=6, frameon=False)
    _finish(fig, result, "512 adapters, Zipf 1.2, rank 64, 4096 -> 14336", path)


def _plot_tokens(result: dict[str, Any], grid: list[dict], path: Path) -> None:
    """Draw the pair's time by tokens beside the best peer's and the floor."""
    rows = _by_tokens(grid, "pair")
    fig, ax = plt.subplots(figsize=(5.5, 3.6))
    series = (
        ("us", OURS, "lora-jax"),
        ("peer_us", PEER, "best peer"),
        ("floor_us", FLOOR, "floor"),
    )
    for key, color, label in series:
        tokens, times = zip(*((r["rows"], r[key]) for r in rows if r.get(key)), strict=True)
        ax.plot(tokens, times, color=color, marker="o", ms=3, label=label)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize=7, frameon=False)
    _finish(fig, result, "shrink and expand, 512 adapters, Zipf 1.2, rank 64, 4096 -> 14336", path)


def _legend(ax: Axes) -> tuple[list, list]:
    return ax.get_legend_handles_labels()


def _finish(fig: Figure, result: dict[str, Any], title: str, path: Path) -> None:
    fig.suptitle(f"{title}; {result['device']}, {result['date']}", fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=150)
    plt.close(fig)
