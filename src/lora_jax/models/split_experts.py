"""Experts of a split model in virtual weight tensors: those of each device in its own memory.

What replaces an expert lies with the device that has this expert, so that no row moves for it; of
experts that are split along their outputs every device has a part. Indices are those of one
device: the base's experts come first, then `extra` ones, of which each has memory on one device
("ep") or on all ("tp").
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from lora_jax.adapters.weights import PROJECTIONS
from lora_jax.memory.virtual import AbstractVirtualMemory
from lora_jax.models.expert_tensors import ExpertPages, ExpertTensors, expert_blocks
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.sharding import Split


class SplitExpertTensors:
    """Methods of ExpertTensors that an engine uses; one thread maps, writes and unmaps."""

    def __init__(
        self,
        model: AbstractCausalLM,
        memories: Sequence[AbstractVirtualMemory],
        split: Split,
        *,
        extra: int,
        extra_bytes: int | None = None,
    ):
        """Move the experts matrix by matrix to the memories of the devices, in mesh order.

        `extra_bytes` are those of one device. Raises as ExpertTensors does.
        """
        self._split, blocks = split, expert_blocks(model)
        sizes = {"extra": extra, "extra_bytes": extra_bytes}
        pairs = zip(split.mesh.devices.flat, memories, strict=True)
        self._parts = [ExpertTensors(model, m, device=device, **sizes) for device, m in pairs]
        self.layers = self._parts[0].layers
        self.num_experts = next(iter(blocks.values())).moe.num_experts
        self._devices: dict[tuple[int, int], Sequence[int]] = {}  # that have a mapped expert
        try:
            for layer, experts in blocks.items():
                for name in PROJECTIONS:
                    param = getattr(experts, name)
                    arrays = [part.move_in(layer, name, param) for part in self._parts]
                    setattr(experts, name, param.replace(_joined(arrays, param[...].sharding)))
        except BaseException:
            self.close()
            raise

    @property
    def expert_bytes(self) -> int:
        """Bytes that one expert takes on a device."""
        return self._parts[0].expert_bytes

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the largest matrix of an expert on a device."""
        return self._parts[0].matrix_bytes

    def map_experts(self, layer: int, indices: Mapping[int, int]) -> None:
        """Give memory to what replaces experts: indices by expert. OutOfPages: none has any."""
        by_device: dict[int, list[int]] = {}
        for expert, index in indices.items():
            for device in self._owners(expert):
                by_device.setdefault(device, []).append(self._local(index))
        done: list[int] = []
        try:
            for device, local in by_device.items():
                self._parts[device].map_all(layer, local)
                done.append(device)
        except BaseException:
            for device in done:
                for index in by_device[device]:
                    self._parts[device].unmap(layer, index)
            raise
        for expert, index in indices.items():
            self._devices[layer, index] = self._owners(expert)

    def begin_write(self, layer: int, index: int, projection: str, matrix: np.ndarray) -> None:
        """Begin to set one matrix [d_out, d_in] of a mapped expert; till it is there it stays."""
        devices = self._devices.get((layer, index), ())
        if not devices:
            raise ValueError(f"Expert {index} of layer {layer} is no adapter's.")
        num_rows = len(matrix) // len(devices)
        for position, device in enumerate(devices):
            rows = matrix[position * num_rows : (position + 1) * num_rows]
            self._parts[device].begin_write(layer, self._local(index), projection, rows)

    def finish_writes(self) -> None:
        """Return when all that was begun is there; raises what failed since the last call."""
        failed: Exception | None = None
        for part in self._parts:
            try:
                part.finish_writes()
            except (ValueError, MemoryError, OSError, RuntimeError) as error:
                failed = failed or error
        if failed:
            raise failed

    def unmap(self, layer: int, index: int) -> None:
        """Take the memory of an adapter's expert, if it has any, from every device that has it."""
        failed: Exception | None = None
        for device in self._devices.pop((layer, index), ()):
            try:
                self._parts[device].unmap(layer, self._local(index))
            except (ValueError, MemoryError, OSError, RuntimeError) as error:
                failed = failed or error
        if failed:
            raise failed

    def pages(self) -> ExpertPages:
        """Return the physical bytes of this moment on all devices; any thread may ask."""
        parts = [part.pages() for part in self._parts]
        base, used, created = (
            sum(getattr(pages, name) for pages in parts)
            for name in ("base_bytes", "used_bytes", "created_bytes")
        )
        return ExpertPages(base, used, created, parts[0].page_bytes)

    def trim(self) -> None:
        """Give the devices the pages back that no expert lies on."""
        for part in self._parts:
            part.trim()

    def close(self) -> None:
        """Give all memory back; the model's arrays are unusable. Nothing may run any more."""
        for part in self._parts:
            part.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when a device's pages, tensors and mapped experts disagree."""
        for device, part in enumerate(self._parts):
            part.check_integrity()
            mapped = {(n, self._local(i)) for (n, i), on in self._devices.items() if device in on}
            assert part.mapped == mapped, f"experts of device {device}"

    def _owners(self, expert: int) -> Sequence[int]:
        """Return the devices that have an expert of the base, or a part of it."""
        if self._split.experts == "tp":
            return range(self._split.size)
        return (expert // self._parts[0].num_experts,)

    def _local(self, index: int) -> int:
        """Return where an index behind all of the base's experts is on a device."""
        return index - self.num_experts + self._parts[0].num_experts


def _joined(arrays: list[jax.Array], sharding: jax.sharding.Sharding) -> jax.Array:
    """Return one array of the devices' parts, where they lie, split as the base's weight was."""
    assert isinstance(sharding, jax.sharding.NamedSharding)
    shape = list(arrays[0].shape)
    axis = next(i for i, name in enumerate(sharding.spec) if name is not None)
    shape[axis] *= len(arrays)
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)
