"""EPx-PPy placement: devices of a LoRA Server by layer and expert (InfiniLoRA, section 4.1).

Adapters are a block of adapters x layers x experts. EPx-PPy cuts the layers into y stages and the
experts into x shards; EP is EPm-PP1, PP is EP1-PPm, and DP deals out whole adapters. No jax.
"""

import dataclasses
import re

import numpy as np

from lora_jax.placement.shape import AdapterShape


@dataclasses.dataclass(frozen=True)
class ServerLayout:
    """A layout of adapters: every (adapter, layer, expert) lies on exactly one device.

    Layers are dealt to the `pp` stages in turn (layer 0 to stage 0, layer 1 to stage 1, ...), so
    that the layers of a cold adapter load on all devices at once. The `ep` devices of a stage
    have consecutive numbers and consecutive, equal ranges of experts. With `dp` > 1 adapters are
    dealt to the devices in turn instead. Raises ValueError for sizes that cannot be laid out.
    """

    shape: AdapterShape
    ep: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("ep", "pp", "dp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}.")
        shape = self.shape
        if self.dp > 1 and self.ep * self.pp > 1:
            raise ValueError(
                f"dp={self.dp} with ep={self.ep}, pp={self.pp}: data parallelism deals out whole "
                "adapters; use ep=1, pp=1 with it, or dp=1."
            )
        if self.dp > shape.adapters:
            raise ValueError(
                f"{shape.adapters} adapters cannot fill dp={self.dp} devices; use at most "
                f"{shape.adapters}."
            )
        if shape.experts % self.ep:
            raise ValueError(
                f"{shape.experts} experts cannot be split evenly over ep={self.ep} devices; "
                f"choose ep from {_listed(divisors(shape.experts))}."
            )
        if self.pp > shape.layers:
            raise ValueError(
                f"{shape.layers} layers cannot fill pp={self.pp} stages; use at most "
                f"{shape.layers} stages and more devices per stage (a larger ep)."
            )

    @property
    def devices(self) -> int:
        """Number of devices, m."""
        return self.dp * self.ep * self.pp

    @property
    def name(self) -> str:
        """The strategy as the paper spells it: EP4-PP2 or DP8."""
        return f"DP{self.dp}" if self.dp > 1 else f"EP{self.ep}-PP{self.pp}"

    @property
    def experts_per_device(self) -> int:
        """Experts of a layer on one device of its group."""
        return self.shape.experts // self.ep

    def device_of(self, adapter: int, layer: int, expert: int) -> int:
        """Return the device that holds one unit. Raises ValueError outside the block."""
        _check_index("adapter", adapter, self.shape.adapters)
        _check_index("layer", layer, self.shape.layers)
        _check_index("expert", expert, self.shape.experts)
        if self.dp > 1:
            return adapter % self.dp
        return layer % self.pp * self.ep + expert // self.experts_per_device

    def devices_of_layer(self, layer: int) -> np.ndarray:
        """Return int64 [adapters, experts]: the device of every unit of one layer (read-only)."""
        _check_index("layer", layer, self.shape.layers)
        size = (self.shape.adapters, self.shape.experts)
        if self.dp > 1:
            return np.broadcast_to(np.arange(self.shape.adapters)[:, None] % self.dp, size)
        shards = np.arange(self.shape.experts) // self.experts_per_device
        return np.broadcast_to(layer % self.pp * self.ep + shards, size)

    def group_of(self, layer: int) -> range:
        """Return the devices that work together on one layer; their number is the sync scope."""
        _check_index("layer", layer, self.shape.layers)
        if self.dp > 1:
            return range(self.dp)
        start = layer % self.pp * self.ep
        return range(start, start + self.ep)

    def adapters_of(self, device: int) -> range:
        """Return the adapters that have units on one device."""
        _check_index("device", device, self.devices)
        first = device if self.dp > 1 else 0
        return range(first, self.shape.adapters, self.dp)

    def layers_of(self, device: int) -> range:
        """Return the layers on one device."""
        _check_index("device", device, self.devices)
        return range(0 if self.dp > 1 else device // self.ep, self.shape.layers, self.pp)

    def experts_of(self, device: int) -> range:
        """Return the experts on one device."""
        _check_index("device", device, self.devices)
        start = device % self.ep * self.experts_per_device
        return range(start, start + self.experts_per_device)

    def bytes_on(self, device: int) -> int:
        """Return the bytes of all units on one device."""
        units = len(self.adapters_of(device)) * self._units_per_adapter(device)
        return units * self.shape.unit_bytes

    @property
    def bytes_per_device(self) -> tuple[int, ...]:
        """Bytes on every device."""
        return tuple(self.bytes_on(device) for device in range(self.devices))

    def capacity(self, device_bytes: int) -> int:
        """Return how many adapters fit when each device has `device_bytes` for them (M)."""
        return device_bytes // self._adapter_bytes * self.dp

    @property
    def _adapter_bytes(self) -> int:
        """Bytes of one adapter on the device that holds most of it."""
        return max(map(self._units_per_adapter, range(self.devices))) * self.shape.unit_bytes

    def require_one(self, device_bytes: int) -> None:
        """Raise ValueError unless one adapter fits into `device_bytes` per device."""
        if self._adapter_bytes > device_bytes:
            raise ValueError(
                f"One adapter needs {self._adapter_bytes:,} bytes on a device of {self.name}, "
                f"which has {device_bytes:,} for adapters; use more devices or a lower rank."
            )

    def require_memory(self, device_bytes: int) -> None:
        """Raise ValueError unless all adapters of the shape fit into `device_bytes` per device."""
        self.require_one(device_bytes)
        fits = self.capacity(device_bytes)
        if fits < self.shape.adapters:
            raise ValueError(
                f"{self.shape.adapters} adapters need {max(self.bytes_per_device):,} bytes on a "
                f"device of {self.name}, which has {device_bytes:,} for adapters; hold at most "
                f"{fits} at a time, or use more devices."
            )

    def servers_of_rank(self, layer: int, rank: int, instance_ranks: int) -> range:
        """Return the devices that rank `rank` of an LLM instance pushes one layer's rows to.

        The instance has its experts in `instance_ranks` equal, consecutive ranges. As its cuts
        and the server's line up, this is one device when it has at least `ep` ranks, and else
        ep / instance_ranks. Raises ValueError where they do not line up.
        """
        self.require_aligned(instance_ranks)
        _check_index("rank", rank, instance_ranks)
        group = self.group_of(layer)
        if self.dp > 1:
            return group
        first = group.start + rank * self.ep // instance_ranks
        return range(first, first + max(self.ep // instance_ranks, 1))

    def ranks_of_server(self, device: int, instance_ranks: int) -> range:
        """Return the ranks of an LLM instance that push to one device."""
        self.require_aligned(instance_ranks)
        _check_index("device", device, self.devices)
        if self.dp > 1:
            return range(instance_ranks)
        first = device % self.ep * instance_ranks // self.ep
        return range(first, first + max(instance_ranks // self.ep, 1))

    def require_aligned(self, instance_ranks: int) -> None:
        """Raise ValueError unless the instance's expert cuts line up with the server's."""
        experts = self.shape.experts
        if instance_ranks < 1 or experts % instance_ranks:
            raise ValueError(
                f"{experts} experts cannot be split evenly over {instance_ranks} ranks of an "
                f"instance; choose from {_listed(divisors(experts))}."
            )
        if self.dp == 1 and self.ep % instance_ranks and instance_ranks % self.ep:
            raise ValueError(
                f"The expert shards of ep={self.ep} do not line up with {instance_ranks} ranks of "
                "an instance; one number must divide the other."
            )

    def _units_per_adapter(self, device: int) -> int:
        return len(self.layers_of(device)) * len(self.experts_of(device))


def hybrid(shape: AdapterShape, ep: int, pp: int, devices: int) -> ServerLayout:
    """Return EPx-PPy with x = `ep`, y = `pp`. Raises ValueError unless x * y is `devices`."""
    if ep * pp != devices:
        pairs = _listed(f"ep{x}-pp{devices // x}" for x in divisors(devices))
        raise ValueError(
            f"ep{ep}-pp{pp} needs {ep * pp} devices and there are {devices}; choose from {pairs}."
        )
    return ServerLayout(shape, ep=ep, pp=pp)


def data_parallel(shape: AdapterShape, devices: int) -> ServerLayout:
    """Return DP: whole adapters are dealt to the devices in turn."""
    return ServerLayout(shape, dp=devices)


def expert_parallel(shape: AdapterShape, devices: int) -> ServerLayout:
    """Return EP: each device has its share of the experts in all layers."""
    return ServerLayout(shape, ep=devices)


def pipeline_parallel(
    shape: AdapterShape, devices: int, device_bytes: int | None = None
) -> ServerLayout:
    """Return PP: each layer on one device, or on as few as can hold it.

    Where one device of `device_bytes` cannot hold its layers, devices are grouped (footnote 2 of
    section 4.1), which is EPx-PPy with the smallest x that fits. It helps where devices outnumber
    the layers or the layers leave a remainder; else a device holds as much with any x. Raises
    ValueError if none fits.
    """
    if device_bytes is None:
        return ServerLayout(shape, pp=devices)
    layout = None
    for x, y in possible_degrees(shape, devices):
        layout = ServerLayout(shape, ep=x, pp=y)
        if layout.capacity(device_bytes) >= shape.adapters:
            return layout
    if layout is None:
        return ServerLayout(shape, pp=devices)  # raises: there are fewer layers than stages
    layout.require_memory(device_bytes)  # raises: the widest group is too small
    return layout


def from_text(text: str, shape: AdapterShape, devices: int) -> ServerLayout:
    """Return the layout that "ep4-pp2", "ep8", "pp8" or "dp8" names, on `devices` devices.

    Raises ValueError for other text, and where the degrees do not multiply to `devices`.
    """
    match = re.fullmatch(r"dp(\d+)|ep(\d+)(?:-pp(\d+))?|pp(\d+)", text.lower())
    if match is None:
        raise ValueError(f"A placement is written ep4-pp2, ep8, pp8 or dp8, not {text!r}.")
    dp, ep, pp, only_pp = (int(part) if part else 1 for part in match.groups())
    pp *= only_pp
    if dp == 1:
        return hybrid(shape, ep, pp, devices)
    if dp != devices:
        raise ValueError(f"{text} needs {dp} devices and there are {devices}; use dp{devices}.")
    return data_parallel(shape, devices)


def possible_degrees(shape: AdapterShape, devices: int) -> list[tuple[int, int]]:
    """Return every (x, y) with x * y = `devices`, x dividing the experts, y at most the layers."""
    return [
        (x, devices // x)
        for x in divisors(shape.experts)
        if devices % x == 0 and devices // x <= shape.layers
    ]


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    return [x for x in range(1, number + 1) if number % x == 0]


def _listed(values) -> str:
    return ", ".join(map(str, values))


def _check_index(name: str, index: int, size: int) -> None:
    if not 0 <= index < size:
        raise ValueError(f"{name} must be in [0, {size}), got {index}.")
