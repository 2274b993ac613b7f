"""Bytes and KV capacity with 1 to 20 ESFT adapters: merged, padded, virtual (ExpertWeave, 5.4).

`python -m bench.esft_memory --out DIR` maps the experts of DeepSeek-V2-Lite and of the adapters of
Table 1, and counts pages: on an accelerator in its own virtual memory, on a CPU in one that only
counts. Nothing is written to them. KV capacity is what the rest of a budget holds. What the budget
pays besides weights and KV is what the paper's own single model paid, and with `--beside-bytes`
also what a server of ours takes (`bench.esft_speed` counts that).
"""

import argparse
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from tqdm import tqdm

from bench import expert_cases as cases
from bench import record
from bench.counting_memory import CountingDriver
from bench.report import plot_esft_memory
from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertSizes
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, ExpertWeights
from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.platforms import for_platform
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.models.expert_tensors import runs

NUM_ADAPTERS = (1, 2, 3, 10, 20)
MOST = max(NUM_ADAPTERS)
LAYERS, LATENT = 27, 576  # of the cache: the first layer has no experts; values a token and layer
MODEL_BYTES = 29.3 * 2**30  # section 5.4: two merged models take 58.6 GB
# Of the paper's device, at the utilisation of section 5.2. It has 64 GiB: two merged models, 62.9e9
# bytes, run on it.
BUDGET_BYTES = int(0.9 * 64 * 2**30)
SINGLE_TOKENS = 810_000  # section 5.4: KV capacity beside one merged model
PAPER_TOKENS = {1: None, 2: 572_000, 3: 477_000}


class MultiEsftMemory:
    """DeepSeek-V2-Lite's expert tensors, or its first layers', and the adapters mapped in them.

    Indices come from the allocator that serves ESFT adapters, so that neighbours share pages as
    they do there.
    """

    def __init__(self, memory: AbstractVirtualMemory, slots: int, layers: int = cases.LAYERS):
        self._layers, experts = range(layers), cases.BASE + slots * cases.E_MAX
        sizes = ExpertSizes(tuple(self._layers), cases.BASE, cases.E_MAX, cases.EXPERT_BYTES)
        self._allocator = ExpertAllocator(slots, sizes)
        # Each tensor may end within a page.
        budget = layers * (experts * cases.EXPERT_BYTES + len(cases.PROJECTIONS) * cases.PAGE)
        self.pool = PagePool(memory, page_bytes=cases.PAGE, budget_bytes=budget)
        dtype = np.dtype(ml_dtypes.bfloat16)
        self._tensors = [
            [WeightTensor(self.pool, (experts, *p), dtype) for p in cases.PROJECTIONS]
            for _ in self._layers
        ]
        for tensors in self._tensors:
            for tensor in tensors:
                tensor.map(range(cases.BASE))
        self.base_bytes = self.bytes

    @property
    def bytes(self) -> int:
        """Bytes of the pages in use, the base's included."""
        return self.pool.stats().in_use * cases.PAGE

    def load(self, name: str, counts: np.ndarray) -> None:
        """Map an adapter with so many experts in each layer."""
        nothing = (np.zeros((0, 0)),) * 3
        experts = {n: dict.fromkeys(range(c), nothing) for n, c in enumerate(counts.tolist()) if c}
        report = AdapterReport(AdapterKind.ESFT, name, name, {}, 0, 0, {}, 0, 0, None, None)
        placement = self._allocator.place(ExpertWeights(experts, report))
        self._allocator.finish_loading(name)
        for layer, indices in placement.indices.items():
            for run in runs(sorted(indices.values())):
                for tensor in self._tensors[layer]:
                    tensor.map(run)

    def unload(self, name: str) -> None:
        """Unmap an adapter."""
        self._allocator.retire(name)
        for placement in self._allocator.take_left():
            for layer, index in placement.places:
                for tensor in self._tensors[layer]:
                    tensor.unmap(range(index, index + 1))
            self._allocator.reclaim(placement)

    def overhead(self, experts: float) -> float:
        """Return the adapters' page bytes over those of so many experts."""
        return (self.bytes - self.base_bytes) / (experts * cases.EXPERT_BYTES)

    def close(self) -> None:
        """Give all memory back."""
        for tensors in self._tensors:
            for tensor in tensors:
                tensor.close()


def device_memory() -> AbstractVirtualMemory:
    """Return this platform's virtual memory; one that only counts on a CPU."""
    platform = jax.default_backend()
    counted = DriverMemory(CountingDriver(cases.PAGE))
    return counted if platform == "cpu" else for_platform(platform)


def kv_tokens(weight_bytes: float, beside_bytes: float | None = None) -> int:
    """Return the tokens that the budget holds beside these weights; 0 if it cannot hold them.

    `beside_bytes` None is what was left of the budget by the paper's single model and its KV.
    """
    token = LAYERS * LATENT * 2
    if beside_bytes is None:
        beside_bytes = BUDGET_BYTES - MODEL_BYTES - SINGLE_TOKENS * token
    return max(0, int((BUDGET_BYTES - beside_bytes - weight_bytes) // token))


def measure(beside_bytes: float | None = None) -> list[dict]:
    """Return one row per number of adapters."""
    counts, multi_esft, rows = cases.table_1_counts(), MultiEsftMemory(device_memory(), MOST), []
    for number in tqdm(range(1, MOST + 1), desc="adapters"):
        multi_esft.load(str(number), counts[cases.ORDER[(number - 1) % len(cases.ORDER)]])
        if number not in NUM_ADAPTERS:
            continue
        loaded = [counts[cases.ORDER[i % len(cases.ORDER)]] for i in range(number)]
        true_experts = int(sum(c.sum() for c in loaded))
        true = true_experts * cases.EXPERT_BYTES
        padded = number * cases.LAYERS * cases.E_MAX * cases.EXPERT_BYTES
        own = multi_esft.bytes - multi_esft.base_bytes
        weights = {
            "merged": number * MODEL_BYTES,
            "padded": MODEL_BYTES + padded,
            "virtual": MODEL_BYTES + own,
        }
        rows.append(
            {
                "adapters": number,
                "true_bytes": true,
                "page_bytes": own,
                "over_true": multi_esft.overhead(true_experts),
                "padded_over_true": padded / true,
                "weight_bytes": weights,
                "kv_tokens": {name: kv_tokens(size) for name, size in weights.items()},
                "paper_kv_tokens": PAPER_TOKENS.get(number),
            }
        )
        if beside_bytes is not None:
            rows[-1]["own_kv_tokens"] = kv_tokens(weights["virtual"], beside_bytes)
    multi_esft.close()
    return rows


def show(row: dict) -> str:
    """Return one line of the table."""
    sizes = "  ".join(f"{k} {v / 2**30:6.1f} GiB" for k, v in row["weight_bytes"].items())
    tokens = "  ".join(f"{k} {v / 1000:4.0f}k" for k, v in row["kv_tokens"].items())
    paper = row["paper_kv_tokens"]
    text = f" (paper {paper / 1000:.0f}k)" if paper else ""
    if "own_kv_tokens" in row:
        text += f", by our own count of the rest {row['own_kv_tokens'] / 1000:.0f}k"
    return (
        f"{row['adapters']:2} adapters  weights: {sizes}  KV tokens: {tokens}{text}  pages over "
        f"true bytes {row['over_true']:.4f}, padding {row['padded_over_true']:.3f}"
    )


def main() -> None:
    """Measure, print the table and write it with its plot."""
    parser = argparse.ArgumentParser(prog="python -m bench.esft_memory", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and plot")
    text = "what a server takes beside weights and KV (bench.esft_speed prints it)"
    parser.add_argument("--beside-bytes", type=float, help=text)
    args = parser.parse_args()
    out, beside = args.out, args.beside_bytes
    device = record.jax_device()
    about = record.about()
    rows = measure(beside)
    print("\n".join(show(row) for row in rows))
    result = about | {"device": device, "budget_bytes": BUDGET_BYTES, "beside_bytes": beside}
    result |= {"rows": rows}
    name = f"esft_memory_{record.in_file_name(device)}"
    record.write(out / f"{name}.json", result)
    plot_esft_memory(result, out / f"{name}.png")


if __name__ == "__main__":
    main()
