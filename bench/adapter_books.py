"""Processor time of the books of one adapter that is read again: of names, tiers and the engine.

`python -m bench.adapter_books --out DIR`: no device. So many names are known, so many copies lie in
host memory, and one copy leaves for each that comes; for this there are no files, reading gives the
same weights at once under another digest. *resolve* is what a caller's thread does, under Python's
lock: the look-up, the copy to evict, the entry. *follow* is what the engine's thread does, between
two steps and while no request can be handed in. *read* is what the files of a shipped adapter take
the caller's thread, with and without a known layout (`lora_jax.adapters.formats.file_layouts`).
"""

import argparse
import dataclasses
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench import record
from bench.adapter_load import adapter, catalogue
from bench.adapter_tiers import ADAPTER, MODEL
from lora_jax.adapters import reader
from lora_jax.adapters.formats.file_layouts import FileLayouts
from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.registry import AdapterRegistry, RegistryLimits
from lora_jax.adapters.row_copies import pin_matrices
from lora_jax.adapters.slots import size_slots
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.models import model_class
from lora_jax.models.loader import read_config
from serving.engine.loop.registry_follower import RegistryFollower
from serving.engine.metrics.metrics import EngineMetrics
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.lora_residency import LoraResidency
from serving.loading.residencies import Residencies

RANK, SLOTS = 16, 30


def measure(known: int, on_host: int, misses: int) -> dict:
    """Return mean milliseconds of processor time for each miss."""
    modules = catalogue()
    sizes = size_slots(modules, SLOTS, RANK, 2)
    loader = AdapterLoader(SlotAllocator(modules, sizes.num_slots, sizes.rows, 2))
    weights, metrics = adapter(0).prepared(), EngineMetrics("model", 1024, {}, SLOTS)

    def read(folder: Path, *_: object, **__: object) -> AdapterWeights:
        report = dataclasses.replace(weights.report, digest=f"digest of {folder.name}")
        return dataclasses.replace(weights, report=report)

    limits = RegistryLimits(
        max_adapters=known, max_in_memory=on_host, max_total_bytes=1 << 60, loads_per_minute=1 << 30
    )
    with tempfile.TemporaryDirectory() as place:
        names = [f"a{number}" for number in range(known)]
        for name in names:
            (Path(place) / name).mkdir()
        registry = AdapterRegistry(modules, lora_dir=place, limits=limits, read=read)
        registry.set_in_use(loader.in_use)
        residencies = Residencies([LoraResidency(loader)])
        follower = RegistryFollower(registry, None, residencies, metrics)
        for name in names:
            registry.resolve(name)
        follower.follow()
        rng, spent = random.Random(0), {"resolve": 0.0, "follow": 0.0}
        for _ in range(misses):
            there = {entry.name for entry in registry.entries()}
            name = rng.choice([name for name in names if name not in there])
            begun = time.thread_time()
            registry.resolve(name)
            resolved = time.thread_time()
            follower.follow()
            spent["resolve"] += resolved - begun
            spent["follow"] += time.thread_time() - resolved
    return {
        "known": known,
        "on_host": on_host,
        "misses": misses,
        "processor_ms": {part: 1e3 * seconds / misses for part, seconds in spent.items()},
    }


def measure_reads(count: int) -> dict[str, float]:
    """Return median milliseconds of processor time of a read, in turns with and without layouts.

    A read ends with what the host keeps, ready to be placed; the files are in the page cache.
    """
    config, copier = read_config(MODEL), HostCopier()
    modules = model_class(config.model_type).catalogue(config)
    ways = {"without_layout": None, "with_layout": FileLayouts()}
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(count + 1):  # the first one learns
        for way, layouts in ways.items():
            begun = time.thread_time()
            weights = reader.read(ADAPTER, modules, root=ADAPTER.parent, layouts=layouts)
            kept = pin_matrices(weights, copier)
            assert isinstance(kept, AdapterWeights), "files of LoRA"
            kept.prepared()
            spent[way].append(time.thread_time() - begun)
    return {way: 1e3 * statistics.median(seconds[1:]) for way, seconds in spent.items()}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_books", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--known", type=int, default=4096, help="names")
    parser.add_argument("--on-host", type=int, default=1000, help="copies in host memory")
    parser.add_argument("--misses", type=int, default=200)
    args = parser.parse_args()
    result = record.about() | measure(args.known, args.on_host, args.misses)
    result["read_processor_ms"] = measure_reads(args.misses)
    record.write(args.out / "adapter_books_cpu.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
