"""Plots of steps and of a CPU beside llama.cpp, from the result files of two commands."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

GROUPS = {  # of kernels, by words of their names; the first that fits
    "attention": ("attention", "combine"),
    "adapters": (
        *("lora_jax::pair_kernel", "lora_jax::few_kernel", "lora_jax::gated_kernel"),
        *("both_kernel", "shrink"),
    ),
    "products": ("grouped_matmul", "dense_rows", "few_rows"),
    "router, rows of experts": ("f32_parts", "choose_experts", "rows_kernel"),
    "norms, rotary embedding": ("rms_norm", "place_heads"),
}
REST = "all else"
COLORS = ("#1f77b4", "#d95f02", "#08306b", "#9a9a9a", "#aec7e8", "#dddddd")
OURS, PEER = ("lora-jax", "#1f77b4"), ("llama.cpp", "#9a9a9a")


def group_of(kernel: str) -> str:
    """Return the group of a kernel's name."""
    fits = (group for group, words in GROUPS.items() if any(word in kernel for word in words))
    return next(fits, REST)


def ms_by_group(kernels: dict[str, list[float]]) -> dict[str, float]:
    """Return the ms of each group, of kernels with (launches, us)."""
    found = dict.fromkeys([*GROUPS, REST], 0.0)
    for name, (_, us) in kernels.items():
        found[group_of(name)] += us / 1000
    return found


def plot_step_limits(result: dict[str, Any], path: Path) -> None:
    """Draw where the time of each step goes, and the device's limit, and write a PNG to `path`."""
    rows = result["rows"]
    fig, axes = plt.subplots(1, len(rows), figsize=(2.2 * len(rows) + 1.4, 3.6), squeeze=False)
    found = [ms_by_group(row["kernels"]) for row in rows.values()]
    shown = [group for group in found[0] if any(ms[group] for ms in found)]
    for ax, (name, row), ms in zip(axes[0], rows.items(), found, strict=True):
        below = 0.0
        for group in shown:
            color = COLORS[list(ms).index(group)]
            ax.bar(0, ms[group], 0.6, bottom=below, color=color, label=group)
            below += ms[group]
        ax.axhline(row["limit_ms"], color="black", lw=1, label="physical limit")
        ax.plot(0, row["ms"], "D", ms=5, color="black", mfc="white", label="time by the clock")
        ax.set_title(f"{name}\nlimit / clock {row['limit_ms'] / row['ms']:.2f}", fontsize=9)
        ax.set_xlim(-0.6, 0.6)
        ax.set_xticks([])
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms per step")
    position = f", position {result['position']}" if "position" in result else ""
    title = f"{result['model']}{position}, {result['device']}, {result['date']}: kernels"
    fig.suptitle(title, fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="lower center", ncol=4, fontsize=7, frameon=False)
    fig.tight_layout(rect=(0, 0.12, 1, 0.97))
    fig.savefig(path, dpi=110)
    plt.close(fig)


def plot_cpu(result: dict[str, Any], path: Path) -> None:
    """Draw output tokens/s beside llama.cpp by base and requests, and write a PNG to `path`."""
    rows = [row for row in result["rows"] if {"ours", "llama.cpp"} <= row["tokens_per_s"].keys()]
    fig, ax = plt.subplots(figsize=(1.3 * len(rows) + 1.6, 3.4))
    for place, row in enumerate(rows):
        rates = row["tokens_per_s"]
        for side, (key, (label, color)) in enumerate({"llama.cpp": PEER, "ours": OURS}.items()):
            at, named = place + (side - 0.5) * 0.4, label if place == 0 else None
            ax.bar(at, rates[key], 0.38, color=color, label=named)
            ax.text(at, rates[key], f"{rates[key]:.0f}", ha="center", va="bottom", fontsize=7)
    names = [f"{r['base']}\n{r['requests']} at once\n{r['over_llama_cpp']:.2f} times" for r in rows]
    ax.set_xticks(range(len(rows)), names, fontsize=7)
    ax.set_ylabel("output tokens / s")
    ax.spines[["top", "right"]].set_visible(False)
    machine = f"{result['device']} ({result.get('processor', 'x86_64')}), {result['date']}"
    lengths = f"{result['prompt_tokens']} tokens in, {result['output_tokens']} out"
    ax.set_title(f"125 million parameters, {lengths}; {machine}", fontsize=8, pad=14)
    ax.legend(fontsize=7, frameon=False, ncol=2, loc="upper right")
    fig.tight_layout()
    fig.savefig(path, dpi=110)
    plt.close(fig)
