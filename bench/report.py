"""Plots and tables from result files; each is made from a JSON that lies beside it."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.esft_plots import plot_esft_speed
from bench.kernel_plots import plot_kernels
from bench.kernels import summary
from bench.lora_server.plots import plot_lora_server

BARS = {
    "peft_mixed": ("transformers + PEFT, 8 adapters", "#9a9a9a"),
    "ours_mixed": ("lora-jax, 8 adapters", "#1f77b4"),
    "ours_base": ("lora-jax, no adapter", "#aec7e8"),
}


def plot_serve_cpu(result: dict[str, Any], path: Path) -> None:
    """Draw output tokens/s per dtype and write a PNG to `path`."""
    fig, axes = plt.subplots(1, len(result["rows"]), figsize=(4.2 * len(result["rows"]), 3.4))
    for ax, row in zip([axes] if len(result["rows"]) == 1 else axes, result["rows"], strict=True):
        rates = row["output_tokens_per_s"]
        for i, (key, (label, color)) in enumerate(BARS.items()):
            ax.bar(i, rates[key], color=color, label=label)
            ax.text(i, rates[key], f"{rates[key]:.0f}", ha="center", va="bottom")
        ax.set_title(f"{row['dtype']}: {row['ours_over_peft']:.1f}x PEFT", fontsize=10)
        ax.set_xticks([])
        ax.set_ylabel("output tokens / s")
        ax.spines[["top", "right"]].set_visible(False)
    case = result["case"]
    fig.suptitle(
        f"{case['requests']} requests, {case['adapters']} adapters of rank {case['rank']}, "
        f"{case['prompt_tokens']} in / {case['output_tokens']} out, {result['device']}",
        fontsize=9,
    )
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="lower center", ncol=3, fontsize=7, frameon=False)
    fig.tight_layout(rect=(0, 0.07, 1, 0.97))
    fig.savefig(path, dpi=150)
    plt.close(fig)


def plot_esft_memory(result: dict[str, Any], path: Path) -> None:
    """Draw weights and KV capacity by number of adapters, and write a PNG to `path`."""
    rows, colors = result["rows"], {"merged": "#9a9a9a", "padded": "#aec7e8", "virtual": "#1f77b4"}
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for i, row in enumerate(rows):
        for j, (name, color) in enumerate(colors.items()):
            at = i + (j - 1) * 0.27
            label = name if i == 0 else None
            left.bar(at, row["weight_bytes"][name] / 2**30, 0.25, color=color, label=label)
            right.bar(at, row["kv_tokens"][name] / 1000, 0.25, color=color)
        if row["paper_kv_tokens"]:
            at = (i - 0.4, i + 0.4)
            tokens = row["paper_kv_tokens"] / 1000
            right.plot(at, (tokens, tokens), color="#d62728", label="ExpertWeave, as printed")
        if own := row.get("own_kv_tokens"):
            label = "virtual, by our own count of the rest"
            right.plot(i + 0.27, own / 1000, "v", ms=4, color="#1f77b4", label=label)
    budget = result["budget_bytes"] / 2**30
    left.axhline(budget, color="#d62728", lw=1, ls="--", label=f"budget {budget:.1f} GiB")
    left.set_ylim(0, 2.2 * budget)
    left.set_ylabel("weights, GiB (merged goes on upwards)")
    right.set_ylabel("KV capacity, thousand tokens")
    for ax in (left, right):
        ax.set_xticks(range(len(rows)))
        ax.set_xticklabels([str(row["adapters"]) for row in rows])
        ax.set_xlabel("ESFT adapters of DeepSeek-V2-Lite")
        ax.spines[["top", "right"]].set_visible(False)
        handles, labels = ax.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        ax.legend(unique.values(), unique.keys(), fontsize=7, frameon=False)
    fig.suptitle(f"Pages mapped on {result['device']}, {result['date']}", fontsize=9)
    fig.tight_layout()
    fig.savefig(path, dpi=150)
    plt.close(fig)


ABLATION_PANELS = (
    ("ttft_p95", "P95 TTFT, s"),
    ("tpot_mean", "mean TPOT, s"),
    ("adapters_at_slo", "adapters that meet the SLO"),
    ("output_tokens_per_s", "output tokens per second"),
)


def plot_ablation(result: dict[str, Any], path: Path) -> None:
    """Draw what each part of disaggregation brings, and write a PNG to `path`.

    Bars at one rate of requests, lines over several.
    """
    rows = [row for row in result["rows"] if "slo_attainment" in row]
    rates = sorted({row["rate"] for row in rows})
    fig, axes = plt.subplots(1, len(ABLATION_PANELS), figsize=(4 * len(ABLATION_PANELS), 3.2))
    for ax, (key, label) in zip(axes, ABLATION_PANELS, strict=True):
        if len(rates) == 1:
            _bars_of_systems(ax, rows, key)
        else:
            _lines_of_systems(ax, rows, key)
        ax.set_title(label, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    said, at = result["options"], ", ".join(f"{rate:g}" for rate in rates)
    fig.suptitle(
        f"{Path(said['model']).name}, {', '.join(map(str, said['splits']))} devices, "
        f"{said['adapters']} adapters, {at} requests/s, {rows[0]['device']}",
        fontsize=9,
    )
    fig.tight_layout()
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _bars_of_systems(ax: Axes, rows: list[dict], key: str) -> None:
    for i, row in enumerate(rows):
        value = row[key] or 0.0
        ax.bar(i, value, color="#9a9a9a" if i == 0 else "#1f77b4")
        ax.text(i, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
    ax.set_xticks(range(len(rows)), [row["name"] for row in rows])
    ax.tick_params(axis="x", labelsize=8)


def _lines_of_systems(ax: Axes, rows: list[dict], key: str) -> None:
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name and row[key] is not None]
        ax.plot([row["rate"] for row in mine], [row[key] for row in mine], "o-", label=name, ms=3)
    ax.set_xlabel("requests/s", fontsize=8)
    ax.legend(fontsize=7, frameon=False)


PLOTS = {
    "ablation_": plot_ablation,
    "serve_cpu": plot_serve_cpu,
    "kernels_": plot_kernels,
    "esft_memory_": plot_esft_memory,
    "esft_speed_": plot_esft_speed,
    "lora_server_": plot_lora_server,
}


def main() -> None:
    """Draw the plot of every result file in a folder again, and write the kernels' table."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=main.__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "results")
    for file in sorted(parser.parse_args().folder.glob("*.json")):
        for prefix, plot in PLOTS.items():
            if file.name.startswith(prefix):
                result = json.loads(file.read_text())
                plot(result, file.with_suffix(".png"))
                print(file.with_suffix(".png"))
                if plot is plot_kernels:
                    file.with_suffix(".md").write_text(summary.table(result))


if __name__ == "__main__":
    main()
