"""Plots of what `python -m bench.kernels` measured."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from bench.kernels.summary import SECTIONS, section

OURS, PEER, FLOOR, BAR = "#1f77b4", "#7f7f7f", "#9ecae1", "#d62728"
SHADES = {1: "#6baed6", 128: "#2171b5", 512: "#08306b"}  # ours, by number of adapters
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}
GROUPS = {  # of the overview, by op
    "LoRA of a linear map": ("pair", "shrink", "expand"),
    "LoRA of a layer of experts": ("moe",),
    "Matrices of experts": ("grouped_matmul", "dense", "experts"),
    "Merge": ("merge",),
    "Attention over pages": ("attention",),
}

PHASES = {  # of the grid, by op
    "shrink": "shrink, 4096 to 64",
    "expand": "expand, 64 to 14336",
    "pair": "both, one launch",
}


def plot_kernels(result: dict[str, Any], path: Path) -> None:
    """Write one PNG of all points to `path`, and beside it those of the grid, if it was measured.

    NAME_phases.png is latency and bandwidth of shrink, expand and both by tokens (as InfiniLoRA's
    Figure 19), NAME_tokens.png the time of linear maps and of layers of experts by tokens, for one
    adapter and for many (as V-LoRA's Figure 17), NAME_popularities.png that of linear maps by
    tokens for every rank and popularity.
    """
    with plt.rc_context(STYLE):
        _plot_points(result, path)
        grid = [row for row in result["rows"] if row["part"] == "grid"]
        everywhere = [row for row in result["rows"] if row["part"] == "popularities"]
        if everywhere:
            _plot_popularities(result, everywhere, path.with_stem(path.stem + "_popularities"))
        if grid:
            _plot_phases(result, grid, path.with_stem(path.stem + "_phases"))
            _plot_tokens(result, grid, path.with_stem(path.stem + "_tokens"))


def _plot_points(result: dict[str, Any], path: Path) -> None:
    """Draw every point's time over its floor, with peer and bar, and write a PNG to `path`."""
    lines = list(_overview([row for row in result["rows"] if section(row) == SECTIONS[0]]))
    fig, ax = plt.subplots(figsize=(7.4, 0.185 * len(lines) + 1.0))
    for i, (text, row) in enumerate(lines):
        if row is None:
            ax.text(-0.01, i, text, weight="bold", ha="right", va="center", transform=_rows(ax))
            continue
        floor = row["floor_us"]
        ax.text(-0.01, i, text, ha="right", va="center", fontsize=7, transform=_rows(ax))
        said = f"{row['us']:.0f}" if row["us"] >= 100 else f"{row['us']:.1f}"
        ax.text(1.07, i, said, ha="right", va="center", fontsize=7, transform=_rows(ax))
        ax.plot([1, row["us"] / floor], [i, i], color=FLOOR, lw=2.5, solid_capstyle="butt")
        if row.get("peer_us"):
            ax.plot(row["peer_us"] / floor, i, "s", color=PEER, label="best peer")
        if row.get("bar_us"):
            ax.plot(row["bar_us"] / floor, i, "|", color=BAR, ms=9, mew=1.6, label="bar")
        ax.plot(row["us"] / floor, i, "o", color=OURS, ms=4.5, label="lora-jax")
    ax.axvline(1, color="black", lw=0.9)
    ax.set(xscale="log", ylim=(len(lines) - 0.4, -0.8), yticks=[])
    _plain_ticks(ax.xaxis, (1, 1.25, 1.5, 2, 3, 4, 6, 8, 12))
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(
        "time over the floor\n(fewest bytes over copy bandwidth, or FLOPs over the dense rate)"
    )
    ax.text(1.07, -0.9, "us", ha="right", va="bottom", fontsize=7, transform=_rows(ax))
    _say(fig, ax, result, f"copy {result['copy_tb_per_s']:.2f} TB/s, cold L2")
    _save(fig, path)


def _overview(rows: list[dict]) -> Iterator[tuple[str, dict | None]]:
    """Yield the overview's lines: a group's title, then the names and rows of its points."""
    for title, ops in GROUPS.items():
        own = [row for row in rows if row["op"] in ops and row["floor_us"] > 0]
        if own:
            yield title, None
            yield from ((row["name"], row) for row in own)


def _rows(ax: Axes):
    """Return coordinates whose x is the part of the axes, and y the row."""
    return ax.get_yaxis_transform()


def _of_phase(grid: list[dict], op: str) -> list[dict]:
    """Return the points of 512 adapters by Zipf, rank 64, in order of tokens."""
    wanted = {"op": op, "popularity": "zipf", "rank": 64, "slots": 512}
    rows = [row for row in grid if all(row.get(k) == v for k, v in wanted.items())]
    return sorted(rows, key=lambda row: row["rows"])


def _plot_phases(result: dict[str, Any], grid: list[dict], path: Path) -> None:
    """Draw latency (solid) above bandwidth (dashed), ours and the best peer's, and the limit."""
    copied = result["copy_tb_per_s"]
    fig, axes = plt.subplots(2, 3, figsize=(7.4, 4.3), sharex=True, sharey="row")
    for (above, below), (op, title) in zip(axes.T, PHASES.items(), strict=True):
        rows = _of_phase(grid, op)
        for key, color, label in (("us", OURS, "lora-jax"), ("peer_us", PEER, "best peer")):
            own = [row for row in rows if row.get(key)]
            tokens = [row["rows"] for row in own]
            above.plot(tokens, [row[key] for row in own], "o-", color=color, label=label)
            rates = [copied * row["floor_us"] / row[key] for row in own]
            below.plot(tokens, rates, "o--", color=color)
        tokens, floors = [row["rows"] for row in rows], [row["floor_us"] for row in rows]
        above.plot(
            tokens, floors, color="black", lw=0.9, label="limit: fewest bytes at copy bandwidth"
        )
        below.axhline(copied, color="black", lw=0.9)
        above.set(title=title, xscale="log", yscale="log")
        below.set(xlabel="tokens", ylim=(0, 1.08 * copied))
        _tokens_axis(below, tokens)
    axes[0, 0].set_ylabel("latency, us")
    axes[1, 0].set_ylabel("bandwidth, TB/s")
    _plain_ticks(axes[0, 0].yaxis, (1, 3, 10, 30, 100, 300))
    what = "512 adapters of rank 64 by Zipf 1.2"
    _say(fig, axes[0, 0], result, what)
    _save(fig, path)


def _plot_tokens(result: dict[str, Any], grid: list[dict], path: Path) -> None:
    """Draw time by tokens: of a linear map, and of each model's layer of experts."""
    layers = [row for row in grid if row["op"] == "moe"]
    panels = {"linear map, 4096 to 14336, rank 64": _of_phase(grid, "pair")}
    for row in layers:
        panels.setdefault(f"experts of {row['model']}, rank {row['rank']}", []).append(row)
    width = max(7.4, 2.3 * len(panels))
    fig, axes = plt.subplots(1, len(panels), figsize=(width, 2.8), squeeze=False)
    for ax, (title, rows) in zip(axes[0], panels.items(), strict=True):
        for adapters, color in SHADES.items():
            own = [row for row in rows if _adapters(row) == adapters]
            _plot_curve(ax, sorted(own, key=_tokens), color)
        ax.set_title(title, fontsize=7.5)
        ax.set(xscale="log", yscale="log", xlabel="tokens")
        _tokens_axis(ax, sorted({_tokens(row) for row in rows}))
        _plain_ticks(ax.yaxis, (1, 3, 10, 30, 100, 300, 1000))
    last = axes[0, -1]
    for adapters, color in SHADES.items():
        said = f"lora-jax, {adapters} adapter" + "s" * (adapters > 1)
        last.plot([], [], "o-", color=color, label=said)
    last.plot([], [], "s", color=PEER, mfc="white", label="best peer")
    last.plot([], [], ":", color=PEER, lw=1, label="limit: fewest bytes")
    axes[0, 0].set_ylabel("shrink and expand, us")
    _say(fig, last, result, "adapters by Zipf 1.2; experts' row map included")
    _save(fig, path)


def _plot_popularities(result: dict[str, Any], rows: list[dict], path: Path) -> None:
    """Draw time by tokens, a panel for each popularity and a curve with its limit for each rank."""
    popularities = list(dict.fromkeys(row["popularity"] for row in rows))
    ranks = sorted({row["rank"] for row in rows})
    colors = plt.get_cmap("Blues")([0.35 + 0.6 * i / len(ranks) for i in range(len(ranks))])
    height = 2.1 * -(-len(popularities) // 3)
    fig, axes = plt.subplots(
        -(-len(popularities) // 3),
        3,
        figsize=(7.4, height),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for ax, popularity in zip(axes.flat, popularities, strict=False):
        for rank, color in zip(ranks, colors, strict=True):
            own = [r for r in rows if (r["popularity"], r["rank"]) == (popularity, rank)]
            _plot_curve(ax, sorted(own, key=_tokens), color)
        ax.set(title=popularity, xscale="log", yscale="log")
    for rank, color in zip(ranks, colors, strict=True):
        axes[0, 0].plot([], [], "o-", color=color, label=f"rank {rank}")
    axes[0, 0].plot([], [], ":", color=PEER, lw=1, label="limit: fewest bytes")
    for ax in axes[-1]:
        ax.set_xlabel("tokens")
        _tokens_axis(ax, sorted({_tokens(row) for row in rows}))
    for ax in axes[:, 0]:
        ax.set_ylabel("shrink and expand, us")
    _plain_ticks(axes[0, 0].yaxis, (3, 10, 30, 100, 300, 1000))
    _say(fig, axes[0, 0], result, "linear map, 4096 to 14336, whose rows ask for adapters so")
    _save(fig, path)


def _plot_curve(ax: Axes, rows: list[dict], color: Any) -> None:
    """Draw one curve with its limit, and the peer where it was measured."""
    tokens = [_tokens(row) for row in rows]
    ax.plot(tokens, [row["us"] for row in rows], "o-", color=color)
    ax.plot(tokens, [row["floor_us"] or math.nan for row in rows], ":", color=color, lw=1)
    known = [row for row in rows if row.get("peer_us")]
    peers = [row["peer_us"] for row in known]
    ax.plot([_tokens(row) for row in known], peers, "s", color=color, mfc="white")


def _tokens(row: dict) -> int:
    """Return the tokens; rows of experts are more than those."""
    return row["tokens" if "tokens" in row else "rows"]


def _adapters(row: dict) -> int:
    return row["adapters" if "adapters" in row else "slots"]


def _tokens_axis(ax: Axes, tokens: list[int]) -> None:
    """Mark the tokens that were measured, as far as their numbers do not touch."""
    shown = tokens[:1]
    for count in tokens:
        if count / shown[-1] >= 4:
            shown.append(count)
    _plain_ticks(ax.xaxis, tuple(shown))


def _plain_ticks(axis, ticks: tuple[float, ...]) -> None:
    """Mark a logarithmic axis at these numbers, within its limits, as they are spoken."""
    low, high = sorted(axis.get_view_interval())
    axis.set_ticks([tick for tick in ticks if low <= tick <= high])
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _say(fig: Figure, ax: Axes, result: dict[str, Any], what: str) -> None:
    """Say above the axes what is seen, and below them, by one's labels, whose it is."""
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    fig.suptitle(f"{result['device']}, {result['date']}: {what}", fontsize=8.5)
    fig.legend(unique.values(), unique.keys(), loc="outside lower center", ncol=len(unique))


def _save(fig: Figure, path: Path) -> None:
    fig.set_layout_engine("constrained")
    fig.savefig(path, dpi=200)
    plt.close(fig)
