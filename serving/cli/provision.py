"""`python -m serving.launch MODEL --provision WORKLOAD.json`: size of a LoRA Server. No jax.

The file describes the load, the instances and what was measured:

    {"adapters": [{"name": "sql", "requests_per_s": 2.5, "output_tokens": 200}, ...],
     "rank": 64, "dtype": "bfloat16",
     "instances": {"count": 4, "devices": 2},
     "server": {"bytes_per_device": 80e9, "most_devices": 16},
     "slo": {"tpot_s": 0.1, "admission_rate": 0.95},
     "base_us": {"attention": 300, "moe": 493},
     "server_us": [{"ep": 4, "batch": 128, "receive": 145, "lora": 142, "send": 207}, ...]}

`adapters` may also be {"count": 512, "zipf": 1.2, "requests_per_s": 35, "output_tokens": 200}.
Times ending in _us are microseconds of one layer. A tail TTFT at the 95th percentile asks for an
admission rate of 0.95 (InfiniLoRA, section 4.2.1).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_jax import strict_json
from lora_jax.config import ModelConfig, from_hf
from lora_jax.placement.assign import assign, loads
from lora_jax.placement.devices import Instances, minimum_devices
from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.picture import picture, spell_bytes
from lora_jax.placement.provision import admission_curve, first_capacity, of_rates
from lora_jax.placement.service_level import (
    LayerBudget,
    LayerTimes,
    Measurement,
    Profile,
    layer_budget,
)
from lora_jax.placement.shape import adapter_shape

_LARGEST, _MOST = 1e18, 100_000  # of a number and of a count
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class AdapterLoad:
    """Arrivals of one adapter's requests and the mean length of its answers."""

    name: str
    requests_per_s: float
    output_tokens: float


@dataclasses.dataclass(frozen=True)
class ProvisionRequest:
    """Contents of a workload file; times in seconds."""

    adapters: tuple[AdapterLoad, ...]
    rank: int
    itemsize: int
    instances: int
    devices_per_instance: int
    bytes_per_device: int
    most_devices: int
    tpot: float
    admission_rate: float
    attention: float
    moe: float
    profile: Profile


def provisioning_of_files(model: str, workload: str) -> str:
    """Return size and layout of a LoRA Server for a model's folder and a workload file, as text.

    Raises ValueError or OSError for a file that cannot be read, or that asks for what cannot be.
    """
    config = from_hf(strict_json.loads((Path(model) / "config.json").read_text()))
    try:
        request = read_request(json.loads(Path(workload).read_text()))
    except ValueError as error:  # also of JSON
        raise ValueError(f"{workload}: {error}") from None
    return provisioning_text(request, config)


def provisioning_text(request: ProvisionRequest, config: ModelConfig) -> str:
    """Return capacity, devices, placement and predicted admission rate as lines of text.

    A request is in flight for its output tokens at the TPOT of the SLO, so that the number in
    flight is the largest that a server within the SLO has (Little's law). Raises ValueError where
    no LoRA Server meets the request.
    """
    seconds = [a.output_tokens * request.tpot for a in request.adapters]
    load = of_rates([a.requests_per_s for a in request.adapters], seconds)
    curve = admission_curve(load)
    capacity = first_capacity(curve, request.admission_rate)
    in_flight = {a.name: x for a, x in zip(request.adapters, load.accesses, strict=True)}
    parts = loads(in_flight, assign(in_flight, request.instances), request.instances)
    batch = max(parts)
    budget = layer_budget(request.tpot, config.num_layers, request.attention, request.moe)
    layout = minimum_devices(
        adapter_shape(config, capacity, request.rank, request.itemsize),
        request.bytes_per_device,
        Instances(request.instances, request.devices_per_instance, batch),
        request.profile,
        budget,
        request.most_devices,
    )
    lines = [
        f"workload   {_workload_text(request, load.global_batch, parts)}",
        f"capacity   {capacity} adapters at a time admit {curve[capacity - 1]:.2%} of the requests "
        f"at once (asked: {request.admission_rate:.2%})",
        f"devices    {_devices_text(layout, request.bytes_per_device, curve)}",
        *_time_lines(request.profile.times(layout.ep, batch), request.instances, budget),
        "placement  " + picture(layout).replace("\n", "\n" + " " * 9),
    ]
    return "\n".join(lines)


def _workload_text(request: ProvisionRequest, in_flight: float, parts: Sequence[float]) -> str:
    arrivals = sum(adapter.requests_per_s for adapter in request.adapters)
    return (
        f"{len(request.adapters)} adapters, {arrivals:.4g} requests/s, {in_flight:.4g} in flight "
        f"on {request.instances} instances, {min(parts):.4g} to {max(parts):.4g} each"
    )


def _devices_text(layout: ServerLayout, device_bytes: int, curve: np.ndarray) -> str:
    room = min(layout.capacity(device_bytes), len(curve))
    return (
        f"{layout.devices} for the LoRA Server, {spell_bytes(max(layout.bytes_per_device))} of "
        f"{spell_bytes(device_bytes)} each; room for {room} adapters, predicted "
        f"immediate-admission rate {curve[room - 1]:.2%}"
    )


def _time_lines(times: LayerTimes, instances: int, budget: LayerBudget) -> list[str]:
    return [
        f"latency    {1e6 * times.total:.0f} us of {1e6 * budget.ffn:.0f} us per layer (Eq. 5)",
        f"throughput {1e6 * times.slowest * instances:.0f} us of {1e6 * budget.layer:.0f} us per "
        f"layer for {instances} instances (Eq. 6)",
    ]


def read_request(content: Any) -> ProvisionRequest:
    """Return what the JSON says, or raise ValueError that names the field."""
    names = ("adapters", "rank", "dtype", "instances", "server", "slo", "base_us", "server_us")
    top = _object(content, "the file", names)
    instances = _object(top["instances"], "instances", ("count", "devices"))
    server = _object(top["server"], "server", ("bytes_per_device", "most_devices"))
    slo = _object(top["slo"], "slo", ("tpot_s", "admission_rate"))
    base = _object(top["base_us"], "base_us", ("attention", "moe"))
    if top["dtype"] not in ITEMSIZE:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, not {top['dtype']!r}.")
    rate = _number(slo, "admission_rate", "slo")
    if rate > 1:
        raise ValueError(f"slo: admission_rate must be at most 1, not {rate} (0.95 for P95).")
    return ProvisionRequest(
        adapters=_read_adapters(top["adapters"]),
        rank=_count(top, "rank", "the file"),
        itemsize=ITEMSIZE[top["dtype"]],
        instances=_count(instances, "count", "instances"),
        devices_per_instance=_count(instances, "devices", "instances"),
        bytes_per_device=int(_number(server, "bytes_per_device", "server")),
        most_devices=_count(server, "most_devices", "server"),
        tpot=_number(slo, "tpot_s", "slo"),
        admission_rate=rate,
        attention=1e-6 * _number(base, "attention", "base_us"),
        moe=1e-6 * _number(base, "moe", "base_us"),
        profile=Profile(map(_read_measurement, _list(top["server_us"], "server_us"))),
    )


def _read_adapters(content: Any) -> tuple[AdapterLoad, ...]:
    if isinstance(content, Mapping):
        where, names = "adapters", ("count", "zipf", "requests_per_s", "output_tokens")
        fields = _object(content, where, names)
        exponent = _number(fields, "zipf", where, zero=True)
        ranks = range(1, _count(fields, "count", where) + 1)
        whole = sum(rank**-exponent for rank in ranks)
        rate, tokens = (_number(fields, name, where) for name in names[2:])
        return tuple(
            AdapterLoad(f"{rank:06}", rate * rank**-exponent / whole, tokens) for rank in ranks
        )
    adapters = tuple(map(_read_adapter, _list(content, "adapters")))
    twice = len(adapters) - len({adapter.name for adapter in adapters})
    if twice or not adapters:
        raise ValueError(
            f"adapters must have names of their own; {twice} of {len(adapters)} do not."
        )
    return adapters


def _read_adapter(content: Any) -> AdapterLoad:
    where = "an entry of adapters"
    fields = _object(content, where, ("name", "requests_per_s", "output_tokens"))
    return AdapterLoad(
        str(fields["name"]),
        _number(fields, "requests_per_s", where, zero=True),
        _number(fields, "output_tokens", where),
    )


def _read_measurement(content: Any) -> Measurement:
    where = "an entry of server_us"
    fields = _object(content, where, ("ep", "batch", "receive", "lora", "send"))
    times = (1e-6 * _number(fields, name, where, zero=True) for name in ("receive", "lora", "send"))
    return Measurement(
        _count(fields, "ep", where), _count(fields, "batch", where), LayerTimes(*times)
    )


def _object(content: Any, where: str, names: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be an object with {', '.join(names)}, not {content!r}.")
    unknown, missing = sorted(set(content) - set(names)), sorted(set(names) - set(content))
    if unknown or missing:
        raise ValueError(
            f"{where} must have exactly {', '.join(names)}; missing: {', '.join(missing) or 'none'}"
            f"; unknown: {', '.join(unknown[:8]) or 'none'}."
        )
    return content


def _list(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a list, not {content!r}.")
    return content


def _number(fields: Mapping[str, Any], name: str, where: str, zero: bool = False) -> float:
    value = fields[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _LARGEST or (value == 0 and not zero):
        least = "from 0 on" if zero else "above 0"
        raise ValueError(f"{where}: {name} must be a number {least}, not {value!r}.")
    return float(value)


def _count(fields: Mapping[str, Any], name: str, where: str) -> int:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise ValueError(f"{where}: {name} must be a whole number in [1, {_MOST}], not {value!r}.")
    return value
