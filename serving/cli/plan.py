"""`python -m serving.launch MODEL --plan ['JSON']`: what a deployment of many adapters needs.

The JSON may have, with these defaults:

    {"adapters": 1000, "zipf": 1.0, "rank": 16, "modules": ["q_proj", ...] (all),
     "device_bytes": 80e9, "price_per_gpu_hour": 2.0, "guide": false}

"trace": "FILE" in the place of adapters and zipf is a file with the adapter of each request, one a
line. "guide" adds the tables of the guide "LoRA and QLoRA for Serving" for the model.

Sizes that a server would have are those of its own flags: --max-loras, --max-lora-rank,
--max-cpu-loras, --max-total-adapter-bytes, --gpu-memory-utilization, --lora-memory-bytes,
--tensor-parallel-size; without the last one, as few devices as have room for weights, a step's own
arrays, adapter slots and KV pages. No jax.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.slot_sizes import rows_per_adapter, saved_rows, size_slots
from lora_jax.placement.picture import spell_bytes
from lora_jax.placement.tiers import lru_hits, top_share, zipf
from lora_jax.rank_rows import rows_nbytes
from serving.api.config import EngineConfig
from serving.cli.guide import MONTH_H, adapter_bytes, attention_of, guide_lines, part_of
from serving.cli.trace_hits import read_trace, tier_hits
from serving.engine.memory.sizing import (
    ASKED_LORA_SHARE,
    CacheSize,
    cache_size,
    free_bytes,
    longest_wanted,
    whole_adapters,
)
from serving.engine.memory.sizing import adapter_bytes as memory_of_adapters

_RANKS = (4, 16, 64, 256)
_MOST_DEVICES = 64  # of tensor_parallel_size


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Load and prices of a plan."""

    adapters: int = 1000
    zipf: float = 1.0
    rank: int = 16
    modules: tuple[str, ...] = ()  # none: all
    device_bytes: float = 80e9
    price_per_gpu_hour: float = 2.0
    guide: bool = False
    trace: tuple[str, ...] = ()  # the adapter of each request; none: drawn by Zipf


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Bytes of a model."""

    weights: int
    kv_per_token: int
    itemsize: int  # of an adapter's values; 1 in 8 bits
    max_positions: int  # of a sequence
    jax_share: Callable[[int], float]  # of each of so many devices' memory
    # Of a step's own arrays on each of so many devices, for sequences of so many tokens.
    step_bytes: Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class DeviceSizes:
    """Bytes that each of several devices has of a model that is split over them."""

    catalogue: LoraCatalogue  # its part of every module
    kv_per_token: int  # bytes


def read_request(text: str) -> PlanRequest:
    """Return what the JSON asks for; ValueError names the field that is wrong."""
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("must be a JSON object.")
    fields = {field.name for field in dataclasses.fields(PlanRequest)}
    unknown = sorted(set(given) - fields)
    if unknown:
        raise ValueError(f"has no field {unknown[0]!r}; it has {', '.join(sorted(fields))}.")
    modules = given.pop("modules", [])
    if not isinstance(modules, list) or not all(isinstance(m, str) for m in modules):
        raise ValueError("modules must be a list of texts.")
    guide, trace = given.pop("guide", False), _trace_of(given)
    if not isinstance(guide, bool):
        raise ValueError(f"guide must be true or false, got {guide!r}.")
    for name, value in given.items():
        _check(name, value)
    if trace:
        given["adapters"] = len(set(trace))
    return PlanRequest(**given, modules=tuple(modules), guide=guide, trace=trace)


def _trace_of(given: dict[str, Any]) -> tuple[str, ...]:
    """Take the trace out of what is given, and read it."""
    path = given.pop("trace", None)
    if path is None:
        return ()
    if not isinstance(path, str):
        raise ValueError("trace must be the path of a file.")
    drawn = next((name for name in ("adapters", "zipf") if name in given), None)
    if drawn is not None:
        raise ValueError(f"trace says what requests name: leave {drawn} out.")
    try:
        return read_trace(path)
    except OSError as error:
        raise ValueError(f"trace {path!r}: {error.strerror or error}.") from None
    except ValueError as error:
        raise ValueError(f"trace {path!r}: {error}") from None


def _check(name: str, value: Any) -> None:
    whole = name in ("adapters", "rank")
    number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
    least = 1 if whole or name == "device_bytes" else 0
    if not number or not math.isfinite(value) or not least <= value <= 1e15:
        kind = "an integer" if whole else "a number"
        raise ValueError(f"{name} must be {kind} of at least {least}, got {value!r}.")
    if name == "adapters" and value > 1_000_000:
        raise ValueError(f"adapters must be at most 1,000,000, got {value}.")


def plan_text(
    request: PlanRequest,
    engine: EngineConfig,
    catalogue: LoraCatalogue,
    sizes: ModelSizes,
    on_each: Callable[[int], DeviceSizes],
) -> str:
    """Return tiers, hit ratios and cost as lines of text; ValueError for what cannot be served.

    `on_each` tells what each of so many devices, at least 2, has of the model.
    """
    if request.rank > engine.max_lora_rank:
        raise ValueError(
            f"rank {request.rank} is above max_lora_rank={engine.max_lora_rank}, and the server "
            "refuses such adapters: set --max-lora-rank."
        )
    one = adapter_bytes(catalogue, request.rank, sizes.itemsize, request.modules)
    longest_wanted(engine, sizes.max_positions)  # an error that no number of devices mends

    def room_on(gpus: int) -> _Room:
        of_device = DeviceSizes(catalogue, sizes.kv_per_token) if gpus == 1 else on_each(gpus)
        return _room_with_step(engine, request, sizes, of_device, gpus)

    room = _asked_room(engine, request, sizes, room_on)
    gpus, of_device, budget, kv = room.gpus, room.of_device, room.adapters, room.kv
    limits = engine.max_loras, engine.max_lora_rank, sizes.itemsize
    spec = size_slots(of_device.catalogue, *limits, budget)
    rows = rows_per_adapter(part_of(of_device.catalogue, request.modules), request.rank)
    on_device = min(engine.max_loras, whole_adapters(rows, spec.rows), request.adapters)
    slots = gpus * rows_nbytes(spec.rows, sizes.itemsize)
    tokens = kv.num_pages * kv.page_size
    by_bytes = engine.max_total_adapter_bytes // one
    on_host = min(engine.max_cpu_loras or by_bytes, by_bytes, request.adapters)
    lines = _model_lines(catalogue, sizes)
    lines += [
        f"one adapter    rank {request.rank} on {', '.join(request.modules) or 'all modules'}: "
        f"{spell_bytes(one)}; {sizes.weights // one} of them take what the model takes",
        f"devices        {gpus} of {spell_bytes(int(request.device_bytes))}",
    ]
    if _counts_step(engine):
        lines.append(f"step           {spell_bytes(gpus * kv.step_bytes)} for a step's own arrays")
    lines += [
        f"adapter slots  {spell_bytes(slots)}: {on_device} adapters",
        f"KV cache       {spell_bytes(gpus * tokens * of_device.kv_per_token)}: {tokens} tokens",
        f"host           {on_host} adapters, {spell_bytes(on_host * one)}",
        f"disk           {request.adapters} adapters, {spell_bytes(request.adapters * one)}",
    ]
    ready = min(on_device, on_host)  # what leaves host memory leaves the device
    hits = _trace_lines(request, ready, on_host, one) if request.trace else None
    lines += [*(hits or _hit_lines(request, ready, on_host)), *_cost_lines(request, gpus)]
    if request.guide:
        lines += guide_lines(catalogue, sizes.weights, sizes.itemsize)
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Room:
    """Room beside the weights, on each of some devices."""

    gpus: int
    of_device: DeviceSizes
    adapters: int  # bytes
    kv: CacheSize


class _NoRoomError(ValueError):
    """So many devices do not hold the model and what it needs beside; more of them may."""


def _asked_room(
    engine: EngineConfig,
    request: PlanRequest,
    sizes: ModelSizes,
    room_on: Callable[[int], _Room],
) -> _Room:
    """Return the room on as many devices as are asked for, else on the fewest that have it.

    `room_on` raises _NoRoomError, or ValueError for a split that the server refuses.
    """
    gpus = engine.tensor_parallel_size
    if gpus > 1:
        return room_on(gpus)
    why: _NoRoomError | None = None
    while gpus <= _MOST_DEVICES:
        if gpus * _usable(engine, request, sizes, gpus) > sizes.weights:
            try:
                return room_on(gpus)
            except _NoRoomError as error:
                why = why or error
            except ValueError as error:
                if why is None:
                    raise
                raise ValueError(f"{why} {gpus} devices cannot have it: {error}") from error
        gpus *= 2
    raise why or _NoRoomError(_without_room(_MOST_DEVICES, request, sizes, engine))


def _room_with_step(
    engine: EngineConfig,
    request: PlanRequest,
    sizes: ModelSizes,
    of_device: DeviceSizes,
    gpus: int,
) -> _Room:
    """Return the room on so many devices beside a step's own arrays. Raises _NoRoomError."""
    if gpus * _usable(engine, request, sizes, gpus) <= sizes.weights:
        raise _NoRoomError(_without_room(gpus, request, sizes, engine))
    given = engine, request, sizes, of_device, gpus
    try:
        room = _room(*given)
        if not _counts_step(engine):
            return room
        return _room(*given, sizes.step_bytes(room.kv.max_model_len, gpus))
    except ValueError as error:
        raise _NoRoomError(*error.args) from error


def _counts_step(engine: EngineConfig) -> bool:
    """Return whether room is left for a step's own arrays, as by the server."""
    return not engine.kv_cache_memory_bytes


def _room(
    engine: EngineConfig,
    request: PlanRequest,
    sizes: ModelSizes,
    of_device: DeviceSizes,
    gpus: int,
    step: int = 0,
) -> _Room:
    """Return what one of so many devices has beside `step` bytes; ValueError: too little."""
    limit = int(sizes.jax_share(gpus) * request.device_bytes)
    free = free_bytes(engine, limit, -(-sizes.weights // gpus), step)
    largest = adapter_bytes(of_device.catalogue, engine.max_lora_rank, sizes.itemsize)
    budget = memory_of_adapters(engine, largest, free, ASKED_LORA_SHARE)
    whole = rows_nbytes(saved_rows(of_device.catalogue), sizes.itemsize)
    if budget + whole >= free:
        others = "weights and adapter slots"
        if step:
            others = f"weights, {spell_bytes(step)} for a step's own arrays and adapter slots"
        raise ValueError(
            f"{_spell(gpus, request)} no room for KV pages beside {others}; lower max_loras or "
            "max_lora_rank, or raise --tensor-parallel-size."
        )
    left = free - budget - whole
    kv = cache_size(engine, of_device.kv_per_token, sizes.max_positions, left, step)
    return _Room(gpus, of_device, budget, kv)


def _usable(engine: EngineConfig, request: PlanRequest, sizes: ModelSizes, gpus: int) -> float:
    """Return the bytes of one of so many devices for weights, adapters and KV pages."""
    return engine.gpu_memory_utilization * sizes.jax_share(gpus) * request.device_bytes


def _without_room(gpus: int, request: PlanRequest, sizes: ModelSizes, engine: EngineConfig) -> str:
    held = spell_bytes(int(gpus * _usable(engine, request, sizes, gpus)))
    return (
        f"{_spell(gpus, request)} {held} for the model's {spell_bytes(sizes.weights)} of weights; "
        + ("raise --tensor-parallel-size." if gpus < _MOST_DEVICES else "give larger device_bytes.")
    )


def _spell(gpus: int, request: PlanRequest) -> str:
    each = spell_bytes(int(request.device_bytes))
    return f"1 device of {each} has" if gpus == 1 else f"{gpus} devices of {each} have"


def _model_lines(catalogue: LoraCatalogue, sizes: ModelSizes) -> list[str]:
    """Return the bytes of the weights, and of one adapter by rank."""
    attention = attention_of(catalogue)
    lines = [f"model          {spell_bytes(sizes.weights)} of weights"]
    for rank in _RANKS:
        every = spell_bytes(adapter_bytes(catalogue, rank, sizes.itemsize))
        some = spell_bytes(adapter_bytes(catalogue, rank, sizes.itemsize, attention))
        shown = f"; on {', '.join(attention)}: {some}" if attention else ""
        lines.append(f"  rank {rank:<4}    on all modules: {every}{shown}")
    return lines


def _hit_lines(request: PlanRequest, on_device: int, on_host: int) -> list[str]:
    shares = zipf(request.adapters, request.zipf)
    device, host = lru_hits(shares, on_device), lru_hits(shares, on_host)
    best = top_share(shares, on_device)
    return [
        f"requests       Zipf {request.zipf:g}: device {device:.1%}, host {host - device:.1%}, "
        f"disk {1 - host:.1%} (longest unused first); the {on_device} most popular get {best:.1%}"
    ]


def _trace_lines(request: PlanRequest, on_device: int, on_host: int, one: int) -> list[str]:
    asked = request.trace
    hits = tier_hits(asked, on_device, on_host, one)
    popular = collections.Counter(asked).most_common(on_device)
    best = sum(count for _, count in popular)
    device, host, disk, first, best = (count / len(asked) for count in (*hits, best))
    return [
        f"requests       {len(asked)} of the trace for {request.adapters} adapters: device "
        f"{device:.1%}, host {host:.1%}, disk {disk:.1%} (the first of each adapter {first:.1%}); "
        f"the {on_device} most popular get {best:.1%}"
    ]


def _cost_lines(request: PlanRequest, gpus: int) -> list[str]:
    month = gpus * request.price_per_gpu_hour * MONTH_H
    copies = month * request.adapters
    return [
        f"cost           {gpus} GPUs at {request.price_per_gpu_hour:g} an hour: {month:,.0f} a "
        f"month of {MONTH_H} h; a copy of the model for each adapter: {copies:,.0f}",
    ]
