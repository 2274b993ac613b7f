"""Time of one load of an adapter onto the device, by its parts, for the thread that drives steps.

`python -m bench.adapter_load --out DIR`: adapters of rank 16 on q_proj and v_proj in the shape of
Llama-3.1-8B, 13.6 MB each, into 4 slots in turn. On a GPU the host copies beside the device's
programs; on a CPU a memmove stands for that copy, so that what the host does is the same.

The parts are: *keep*, once for each adapter read from the disk, by another thread; *place*, its
slot and rows; *fence*, the request for a point from which nobody reads free rows; *wait*, until
that point; *begin*, handing the copies over; *transfer*, until they have arrived; *publish*, the
table. The engine's thread does place, fence, begin and publish; the others pass beside its steps.
"""

import argparse
import ctypes
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench import record
from lora_jax.adapters.catalogue import LoraCatalogue, LoraModule
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.row_copies import Copier, LoraCopyJob, pin_matrices
from lora_jax.adapters.slots import AdapterSlots, init_slots, size_slots, warm_up
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from serving.runtime.device_copier import device_copier

LAYERS, RANK, SLOTS = 32, 16, 4
SITES = {"q_proj": (4096, 4096), "v_proj": (4096, 1024)}
PARTS = ("keep", "place", "fence", "wait", "begin", "transfer", "publish")
OF_ENGINE = ("place", "fence", "begin", "publish")


class HostCopier:
    """Copier into arrays of a CPU."""

    def begin_write_into(self, array: jax.Array, offset: int, data: np.ndarray) -> None:
        ctypes.memmove(array.unsafe_buffer_pointer() + offset, data.ctypes.data, data.nbytes)

    def pin(self, data: np.ndarray) -> None:
        del data

    def writes_done(self) -> bool:
        return True

    def finish_writes(self) -> None:
        pass


def catalogue() -> LoraCatalogue:
    """Return the modules that the adapters change."""
    modules = {
        name: LoraModule(name, d_in, d_out, tuple(range(LAYERS)))
        for name, (d_in, d_out) in SITES.items()
    }
    return LoraCatalogue("llama", LAYERS, modules, ())


def adapter(number: int) -> AdapterWeights:
    """Return an adapter of random numbers, as one that a file held."""
    rng, sites = np.random.default_rng(number), {}
    for layer in range(LAYERS):
        for name, widths in SITES.items():
            a, b = (
                rng.standard_normal((1, RANK, width), np.float32).astype(ml_dtypes.bfloat16)
                for width in widths
            )
            sites[name, layer] = SiteWeights(a, b, 1.0)
    size = sum(site.a.nbytes + site.b.nbytes for site in sites.values())
    report = AdapterReport(
        AdapterKind.LORA, str(number), f"{number:064x}", {}, size, size, {}, RANK, 0, None, None
    )
    return AdapterWeights(sites, report)


@dataclasses.dataclass
class Spent:
    """Seconds of each part of one load, and processor seconds of the engine's thread."""

    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    processor_s: float = 0.0

    def of[T](self, part: str, action: Callable[[], T]) -> T:
        """Return what an action returns; its time is the part's."""
        begun, processor = time.perf_counter(), time.thread_time()
        done = action()
        self.seconds[part] += time.perf_counter() - begun
        if part in OF_ENGINE:
            self.processor_s += time.thread_time() - processor
        return done


class TimedCopier:
    """A copier that says how many copies it began and how long that took."""

    def __init__(self, copier: Copier):
        self._copier, self.begun, self.begun_s = copier, 0, 0.0
        self.pin, self.finish_writes = copier.pin, copier.finish_writes
        self.is_late = False  # what was begun counts as on its way

    def begin_write_into(self, array: jax.Array, offset: int, data: np.ndarray) -> None:
        begun = time.perf_counter()
        self._copier.begin_write_into(array, offset, data)
        self.begun_s += time.perf_counter() - begun
        self.begun += 1

    def writes_done(self) -> bool:
        return not self.is_late and self._copier.writes_done()


def load(
    kept: AdapterWeights, slots: AdapterSlots, allocator: SlotAllocator, copier: TimedCopier
) -> tuple[AdapterSlots, Spent]:
    """Return the slots with an adapter in them, and what that took."""
    one = Spent()
    copier.begun, copier.begun_s, copier.is_late = 0, 0.0, True

    def place() -> LoraCopyJob:
        allocator.make_room(kept)
        return LoraCopyJob(allocator.place(kept), slots, copier)

    def advance() -> AdapterSlots:
        return job.advance(slots, 1000)

    job = one.of("place", place)
    slots = one.of("fence", advance)
    while not copier.begun:
        one.of("wait", functools.partial(jax.block_until_ready, slots))
        slots = one.of("fence", advance)
    one.seconds["fence"] -= copier.begun_s
    one.seconds["begin"] = copier.begun_s
    copier.is_late = False
    one.of("transfer", lambda: _until(copier.writes_done))
    slots = one.of("publish", advance)
    assert job.done, "the bytes are there and the adapter is not"
    allocator.finish_loading(kept.digest)
    return slots, one


def measure(loads: int) -> dict:
    """Return medians of each part, in milliseconds."""
    copier = TimedCopier(device_copier() or HostCopier())
    modules = catalogue()
    sizes = size_slots(modules, SLOTS, RANK, 2)
    allocator = SlotAllocator(modules, sizes.num_slots, sizes.rows, 2)
    slots = warm_up(init_slots(modules, sizes, jnp.dtype("bfloat16")))
    spent, keeps = [], []
    for number in range(loads + SLOTS):  # the first fill the slots
        weights = adapter(number)
        begun = time.perf_counter()
        kept = pin_matrices(weights, copier).prepared()
        keeps.append(time.perf_counter() - begun)
        slots, one = load(kept, jax.block_until_ready(slots), allocator, copier)
        spent.append(one)
    spent, keeps = spent[SLOTS:], keeps[SLOTS:]
    median = {part: 1e3 * statistics.median(one.seconds[part] for one in spent) for part in PARTS}
    median["keep"] = 1e3 * statistics.median(keeps)
    return {
        "loads": loads,
        "adapter_bytes": weights.report.weight_bytes,
        "ms": median,
        "engine_thread_processor_ms": 1e3 * statistics.median(one.processor_s for one in spent),
        "copies": copier.begun,
    }


def _until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--loads", type=int, default=20)
    args = parser.parse_args()
    device = record.jax_device()
    result = record.about(device) | measure(args.loads)
    record.write(args.out / f"adapter_load_{record.in_file_name(device)}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
