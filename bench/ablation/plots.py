"""Plots of the results of `python -m bench.ablation`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

PANELS = (  # key of a row, what is shown, factor
    ("ttft_p95", "time to first token, 95th percentile, ms", 1e3),
    ("tpot_mean", "time per output token, mean, ms", 1e3),
    ("adapters_at_slo", "adapters within the SLO, %", 100),
    ("output_tokens_per_s", "output tokens per second", 1),
)
NAMES = {
    "coupled": "adapters on every instance",
    "+disagg": "LoRA Server",
    "+overlap": "+ overlapped exchanges",
    "+loading": "+ layer-wise loading",
    "+kernel": "+ fast kernels (as shipped)",
    "+kernel 2+2:ep1-pp2": "as shipped, EP1-PP2",
    "aside": "as shipped, separate stream",
}
COUPLED = "#7f7f7f"


def plot_ablation(result: dict[str, Any], path: Path) -> None:
    """Draw each system's figures and write a PNG to `path`: bars at one rate, else lines."""
    rows = [row for row in result["rows"] if "slo_attainment" in row]
    rates = sorted({row["rate"] for row in rows})
    fig, axes = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
    for ax, (key, label, factor) in zip(axes.flat, PANELS, strict=True):
        if len(rates) == 1:
            _bars(ax, rows, key, factor)
        else:
            _lines(ax, rows, rates, key, factor)
        ax.set_title(label, fontsize=9)
        ax.set_ylim(bottom=0)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncol=3, fontsize=8, frameon=False)
    options, shown = result["options"], ", ".join(f"{rate:g}" for rate in rates)
    fig.suptitle(
        f"{Path(options['model']).name}, {options['adapters']} adapters, {shown} requests/s, "
        f"{', '.join(map(_devices, options['splits']))}, {rows[0]['device']}",
        fontsize=9,
    )
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _devices(split: str) -> str:
    """Return the devices of instances and of the LoRA Server: "2+2:ep1-pp2" has its layout too."""
    devices, _, layout = str(split).partition(":")
    instances, _, server = devices.partition("+")
    return f"{instances} for instances + {server} for the LoRA Server {layout}".rstrip()


def _color(name: str, place: int) -> str:
    return COUPLED if name == "coupled" else f"C{place - 1}"


def _bars(ax: Axes, rows: list[dict], key: str, factor: float) -> None:
    for place, row in enumerate(rows):
        value = factor * (row[key] or 0.0)
        name = row["name"]
        ax.bar(place, value, color=_color(name, place), label=NAMES.get(name, name))
        ax.text(place, value, f"{value:.3g}", ha="center", va="bottom", fontsize=8)
    ax.set_xticks([])


def _lines(ax: Axes, rows: list[dict], rates: list[float], key: str, factor: float) -> None:
    for place, name in enumerate(dict.fromkeys(row["name"] for row in rows)):
        own = [row for row in rows if row["name"] == name and row[key] is not None]
        ax.plot(
            [row["rate"] for row in own],
            [factor * row[key] for row in own],
            "o-",
            color=_color(name, place),
            label=NAMES.get(name, name),
            ms=3,
        )
    ax.set_xticks(rates)
    ax.set_xlabel("requests/s", fontsize=8)
