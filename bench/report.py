"""Plots and tables of the result files, each drawn from the JSON beside it."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.ablation.plots import plot_ablation
from bench.adapter_eviction import plot_adapter_eviction
from bench.end_to_end.plots import plot_end_to_end
from bench.esft_plots import plot_esft_speed
from bench.functions.plots import plot_functions
from bench.kernel_plots import plot_kernels
from bench.kernels import summary
from bench.lora_server.plots import plot_lora_server
from bench.parallel.plots import plot_cluster, plot_exchange
from bench.step_plots import plot_cpu, plot_step_limits
from bench.vision import plots as vision_plots

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
        ax.set_title(f"{row['dtype']}: {row['ours_over_peft']:.1f} times PEFT", fontsize=10, pad=12)
        ax.set_xticks([])
        ax.set_ylabel("output tokens / s")
        ax.spines[["top", "right"]].set_visible(False)
    case = result["case"]
    fig.suptitle(
        f"{case['requests']} requests, {case['adapters']} adapters of rank {case['rank']}, "
        f"{case['prompt_tokens']} tokens in, {case['output_tokens']} out; {result['device']}",
        fontsize=9,
    )
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="lower center", ncol=3, fontsize=7, frameon=False)
    fig.tight_layout(rect=(0, 0.07, 1, 0.97))
    fig.savefig(path, dpi=110)
    plt.close(fig)


ESFT_FORMS = {
    "merged": ("one merged model per adapter", "#9a9a9a"),
    "padded": ("padded tensors", "#aec7e8"),
    "virtual": ("virtual tensors (lora-jax)", "#1f77b4"),
}
PAPER = "#d95f02"


def plot_esft_memory(result: dict[str, Any], path: Path) -> None:
    """Draw weights and KV capacity by number of adapters, and write a PNG to `path`."""
    rows = result["rows"]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.9), layout="constrained")
    for i, row in enumerate(rows):
        for j, (name, (label, color)) in enumerate(ESFT_FORMS.items()):
            at = i + (j - 1) * 0.27
            left.bar(at, row["weight_bytes"][name] / 2**30, 0.25, color=color, label=label)
            right.bar(at, row["kv_tokens"][name] / 1000, 0.25, color=color)
        if row["paper_kv_tokens"]:
            at, tokens = (i - 0.4, i + 0.4), row["paper_kv_tokens"] / 1000
            right.plot(at, (tokens, tokens), color=PAPER, lw=1.5, label="ExpertWeave (paper)")
        if own := row.get("own_kv_tokens"):
            label = "virtual tensors, with our engine's own memory"
            right.plot(i + 0.27, own / 1000, "v", ms=4, color="#08306b", label=label)
    budget = result["budget_bytes"] / 2**30
    left.axhline(budget, color="black", lw=1, label=f"memory budget, {budget:.1f} GiB")
    left.set_ylim(0, 2.2 * budget)
    left.set_title("weights, GiB (axis cut)", fontsize=9)
    right.set_title("room for KV cache, thousand tokens", fontsize=9)
    shown = {}
    for ax in (left, right):
        ax.set_xticks(range(len(rows)), [str(row["adapters"]) for row in rows])
        ax.set_xlabel("ESFT adapters of DeepSeek-V2-Lite")
        ax.spines[["top", "right"]].set_visible(False)
        handles, labels = ax.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    fig.legend(shown.values(), shown, loc="outside lower center", ncol=3, fontsize=7, frameon=False)
    fig.suptitle(f"Pages mapped on {result['device']}, {result['date']}", fontsize=9)
    fig.savefig(path, dpi=110)
    plt.close(fig)


PLOTS = {
    "adapter_eviction": plot_adapter_eviction,
    "ablation_": plot_ablation,
    "end_to_end_lora-jax_": plot_end_to_end,
    "serve_cpu": plot_serve_cpu,
    "step_limits_": plot_step_limits,
    "cpu_": plot_cpu,
    "kernels_": plot_kernels,
    "esft_memory_": plot_esft_memory,
    "esft_speed_": plot_esft_speed,
    "lora_server_": plot_lora_server,
    "functions_simulated": plot_functions,
    "parallel_cluster_": plot_cluster,
    "parallel_exchange_": plot_exchange,
    **{f"vision_{part}_": plot for part, plot in vision_plots.PLOTS.items()},
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
                if file.with_suffix(".png").exists():
                    print(file.with_suffix(".png"))
                if plot is plot_kernels:
                    file.with_suffix(".md").write_text(summary.table(result))


if __name__ == "__main__":
    main()
