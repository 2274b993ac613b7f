"""Plots of the results of `python -m bench.kernels`."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from bench.kernels.summary import SECTIONS, section

OURS, PEER = "#1f77b4", "#7f7f7f"
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
# Of the overview: how many points of each op it shows at most, those with a peer first.
SHOWN = {"pair": 3, "shrink": 1, "expand": 2, "moe": 3, "grouped_matmul": 1, "merge": 1}
SHOWN |= {"attention": 1}
WORDS = {  # of a point's name
    "pair ": "LoRA ",
    "MoE LoRA": "LoRA of experts,",
    "grouped matmul": "experts' matrix",
    ", decode": "",
    ", prefill": "",
    "Zipf 1.2": "512 adapters",
    "4096 -> 14336, ": "",
    ", rank 64": "",
}
POPULARITIES = {
    "identical": "all tokens use one adapter",
    "uniform": "512 adapters, equal shares",
    "skewed": "512 adapters, skewed",
    "distinct": "each token its own adapter",
    "zipf": "512 adapters by Zipf 1.2",
    "none": "no adapter",
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
        if rows := overview([row for row in result["rows"] if section(row) == SECTIONS[0]]):
            _plot_points(result, rows, path)
        grid = [row for row in result["rows"] if row["part"] == "grid"]
        everywhere = [row for row in result["rows"] if row["part"] == "popularities"]
        if everywhere:
            _plot_popularities(result, everywhere, path.with_stem(path.stem + "_popularities"))
        if grid:
            _plot_phases(result, grid, path.with_stem(path.stem + "_phases"))
            _plot_tokens(result, grid, path.with_stem(path.stem + "_tokens"))


def _plot_points(result: dict[str, Any], rows: list[dict], path: Path) -> None:
    """Draw the time of at most twelve points, ours and the best peer's, over the limit."""
    fig, ax = plt.subplots(figsize=(7.4, 0.36 * len(rows) + 1.2))
    for i, row in enumerate(rows):
        for at, key, color, label in (
            (i - 0.19, "us", OURS, "lora-jax"),
            (i + 0.19, "peer_us", PEER, "best peer"),
        ):
            if row.get(key):
                over = row[key] / row["floor_us"]
                ax.barh(at, over, 0.36, color=color, label=label)
                ax.text(over + 0.03, at, f"{row[key]:.0f} us", va="center", fontsize=7)
    label = "physical limit: fewest bytes over copy bandwidth"
    ax.axvline(1, color="black", lw=1, label=label)
    ax.set_yticks(range(len(rows)), [_words(row["name"]) for row in rows])
    most = max(max(row["us"], row.get("peer_us") or 0) / row["floor_us"] for row in rows)
    ax.set(
        ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1.12 * most), xlabel="time over the physical limit"
    )
    ax.grid(axis="y", visible=False)
    what = "LoRA of 4096 to 14336 columns, rank 64, unless named; cold L2"
    _say(fig, ax, result, what)
    _save(fig, path)


def overview(rows: list[dict]) -> list[dict]:
    """Return the overview's points in the order of SHOWN; every other one is in the table."""
    results = []
    for op, most in SHOWN.items():
        own = [row for row in rows if row["op"] == op and row["floor_us"] > 0]
        own = [row for row in own if "without y" not in row["name"]]
        results += sorted(own, key=lambda row: not row.get("peer_us"))[:most]
    return results


def _words(name: str) -> str:
    for short, long in WORDS.items():
        name = name.replace(short, long)
    return name


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
        above.plot(tokens, floors, color="black", lw=0.9, label="physical limit: copy bandwidth")
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
        text = f"lora-jax, {adapters} adapter" + "s" * (adapters > 1)
        last.plot([], [], "o-", color=color, label=text)
    last.plot([], [], "s", color=PEER, mfc="white", label="best peer")
    last.plot([], [], ":", color=PEER, lw=1, label="physical limit: fewest bytes")
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
        ax.set(title=POPULARITIES[popularity], xscale="log", yscale="log")
    for rank, color in zip(ranks, colors, strict=True):
        axes[0, 0].plot([], [], "o-", color=color, label=f"rank {rank}")
    axes[0, 0].plot([], [], ":", color=PEER, lw=1, label="physical limit: fewest bytes")
    for ax in axes[-1]:
        ax.set_xlabel("tokens")
        _tokens_axis(ax, sorted({_tokens(row) for row in rows}))
    for ax in axes[:, 0]:
        ax.set_ylabel("shrink and expand, us")
    _plain_ticks(axes[0, 0].yaxis, (3, 10, 30, 100, 300, 1000))
    _say(fig, axes[0, 0], result, "LoRA of a linear map, 4096 to 14336 columns")
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
    """Mark measured tokens, the first and last and those between that leave room for a number."""
    first, last = min(tokens, default=1), max(tokens, default=1)
    shown, room = [first], (last / first) ** 0.19
    for count in tokens:
        if count / shown[-1] >= room and last / count >= room:
            shown.append(count)
    _plain_ticks(ax.xaxis, (*shown, last))


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
    fig.savefig(path, dpi=130)
    plt.close(fig)
