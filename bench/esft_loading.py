"""Loading times of an ESFT adapter from host memory and disk, and its unloading."""

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from bench.esft_model import DRAWN, MultiEsftModel
from bench.esft_steps import Row
from lora_jax.adapters.formats import esft_format
from lora_jax.adapters.formats.folder import PIECE_BYTES
from lora_jax.adapters.weights import PROJECTIONS, ExpertWeights
from serving.loading.expert_loading import ExpertLoadJob

COPY_BYTES = 1 << 28
SHARD_EXPERTS = 64  # in one file
LOADS = 3


FirstUse = Callable[[jax.Array], object]  # runs a step by reroute tables


def rows(multi_esft: MultiEsftModel, first_use_of: Callable[[int], FirstUse]) -> Iterator[Row]:
    """Yield loads of the smallest adapter and its unload.

    Beside a load are its bytes over the copy rate, or over the disk's where that is read.
    `first_use_of` a slot returns what waits for one step of the adapter there.
    """
    adapter = int(np.argmin([counts.sum() for counts in multi_esft.shape.counts]))
    multi_esft.unload(str(adapter))
    first_use = first_use_of(adapter)
    weights, catalogue = on_host(multi_esft, adapter), multi_esft.model.catalogue(multi_esft.config)
    rate = copy_rate()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_files(folder, weights)

        def from_disk() -> ExpertWeights:
            forget(folder)
            return esft_format.read(folder, catalogue)

        kinds = {
            "host memory": (lambda: weights, rate),
            "page cache": (lambda: esft_format.read(folder, catalogue), rate),
            "disk": (from_disk, disk_rate(folder)),
        }
        for name, (reader, its_rate) in kinds.items():
            _in_and_out(multi_esft, reader, first_use, its_rate)  # whatever is slow only once
            before = device_used(multi_esft)
            runs = [
                _in_and_out(multi_esft, reader, first_use, its_rate, before) for _ in range(LOADS)
            ]
            loads, unloads = (
                sorted(kind, key=lambda row: row.us) for kind in zip(*runs, strict=True)
            )
            load, unload = loads[LOADS // 2], unloads[LOADS // 2]
            yield dataclasses.replace(load, name=f"load from {name} to first use")
            yield dataclasses.replace(unload, name=f"unload after a load from {name}")
    multi_esft.load(adapter)


def on_host(multi_esft: MultiEsftModel, adapter: int) -> ExpertWeights:
    """Return an adapter with matrices of its own in host memory."""
    drawn = [[np.asarray(m) for m in multi_esft._drawn[name]] for name in PROJECTIONS]
    chosen = multi_esft.choose(adapter)
    for experts in chosen.experts.values():
        for n, expert in enumerate(experts):
            experts[expert] = tuple(kind[n % DRAWN].copy() for kind in drawn)
    return chosen


def write_files(folder: Path, weights: ExpertWeights) -> None:
    """Write an adapter as ESFT does."""
    names = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight": matrix
        for layer, experts in weights.experts.items()
        for expert, matrices in experts.items()
        for name, matrix in zip(PROJECTIONS, matrices, strict=True)
    }
    listed, step = sorted(names), len(PROJECTIONS) * SHARD_EXPERTS
    for start in range(0, len(listed), step):
        file = folder / f"model-{start:05}.safetensors"
        save_file({name: names[name] for name in listed[start : start + step]}, file)
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    experts = {str(layer): list(experts) for layer, experts in weights.experts.items()}
    config = {"experts": experts, "shared_experts": False, "non_expert_modules": False}
    (folder / "expert_cfg.json").write_text(json.dumps(config))


def copy_rate() -> float:
    """Return bytes per second of a large copy to the device, from pinned memory if it has any."""
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if "pinned_host" in kinds else "unpinned_host"
    host = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    values = jax.block_until_ready(jax.device_put(np.ones(COPY_BYTES, np.uint8), host))
    took = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(jax.device_put(values, there, may_alias=False))
        took.append(time.perf_counter() - start)
    return COPY_BYTES / min(took)


def disk_rate(folder: Path) -> float:
    """Return bytes per second of reading a folder's files in pieces, eight at a time."""
    forget(folder)
    files = {file: file.stat().st_size for file in folder.iterdir()}
    pieces = [(file, at) for file, size in files.items() for at in range(0, size, PIECE_BYTES)]

    def read(piece: tuple[Path, int]) -> int:
        with open(piece[0], "rb") as opened:
            return len(os.pread(opened.fileno(), PIECE_BYTES, piece[1]))

    start = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        done = sum(threads.map(read, pieces))
    return done / (time.perf_counter() - start)


def device_used(multi_esft: MultiEsftModel) -> int:
    """Return bytes in use by the driver's count, or by ours where no driver counts."""
    usage = multi_esft.memory.usage()
    return usage.created if usage.device_used is None else usage.device_used


def _in_and_out(
    multi_esft: MultiEsftModel,
    read: Callable[[], ExpertWeights],
    first_use: FirstUse,
    rate: float,
    before: int = 0,
) -> tuple[Row, Row]:
    """Load and use an adapter once, then unload it.

    The unload's `left MB` is what the device's driver counts more than `before`.
    """
    load, digest = _load(multi_esft, read, first_use, rate)
    during, begun = device_used(multi_esft), time.perf_counter()
    multi_esft.unload(digest)
    took = time.perf_counter() - begun
    left = device_used(multi_esft) - before
    freed = {"freed MB": (during - before - left) / 1e6, "left MB": left / 1e6}
    return load, Row("unload", took * 1e6, more={"GB": load.more["GB"], **freed})


def _load(
    multi_esft: MultiEsftModel, read: Callable[[], ExpertWeights], first_use: FirstUse, rate: float
) -> tuple[Row, str]:
    """Return what a load takes from asking for it to the end of its first step; its digest."""
    tables = jax.block_until_ready(jnp.asarray(multi_esft.tables))
    start = time.perf_counter()
    weights = read()
    known = time.perf_counter()
    placement = multi_esft.allocator.place(weights)
    job = ExpertLoadJob(placement, multi_esft.tensors)
    tables = job.advance(tables, len(placement.indices))  # memory for all layers' experts
    mapped = time.perf_counter()
    tables = jax.block_until_ready(job.advance(tables, 1 << 40))
    multi_esft.allocator.finish_loading(placement.digest)
    there = time.perf_counter()
    first_use(tables)
    end = time.perf_counter()
    multi_esft.tables = np.array(tables)
    size = weights.num_experts * multi_esft.tensors.expert_bytes
    more = {
        "GB": size / 1e9,
        "read ms": (known - start) * 1e3,
        "map ms": (mapped - known) * 1e3,
        "write ms": (there - mapped) * 1e3,
        "step ms": (end - there) * 1e3,
        "write GB/s": size / (there - mapped) / 1e9,
        "its floor's GB/s": rate / 1e9,
    }
    took = (end - start) * 1e6
    return Row("load", took, base_us=size / rate * 1e6, more=more), weights.digest


def forget(folder: Path) -> None:
    """Let the system forget what it knows of the files, so that the disk is read."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
