"""Library that joins this process to a world (world.World): a backend's, found by entry point."""

import importlib.metadata
from typing import Protocol

import jax

from serving.lora_server.transport.device_endpoints import BACKENDS
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.symmetric import SymmetricEndpoints
from serving.lora_server.transport.world import World

GROUP = "lora_jax.transport_world"  # entry points: a function that returns a WorldLibrary


class WorldLibrary(Protocol):
    """Functions of a backend's library of symmetric memory."""

    def new_id(self, *, one_host: bool) -> bytes:
        """Return the id of a new world; only in the process that will be its PE 0.

        Raises NotImplementedError where the library cannot run.
        """
        ...

    def join(
        self,
        device: int,
        pe: int,
        size: int,
        world: bytes,
        slot_bytes: int,
        *,
        servers: int,
        one_host: bool,
    ) -> SymmetricEndpoints:
        """Return a device of this process as PE `pe` of `size`, when all of them have come.

        `slot_bytes` is the size of the largest slot, equal on all PEs. PEs below `servers` exchange
        with the others only. Raises RuntimeError when the world does not begin, and
        NotImplementedError where the library cannot run.
        """
        ...


def library() -> WorldLibrary:
    """Return the library for the devices of this process.

    Raises NotImplementedError where no backend has one.
    """
    platform = jax.default_backend()
    for entry in importlib.metadata.entry_points(
        group=GROUP, name=BACKENDS.get(platform, platform)
    ):
        return entry.load()()
    if platform in BACKENDS:
        raise NotImplementedError(
            "This installation of lora-jax is of a release without the transport nvshmem: install "
            "it anew."
        )
    raise NotImplementedError(
        f"The transport nvshmem joins NVIDIA GPUs, and this process computes on {platform}: leave "
        "--lora-server-transport out, or choose tcp or nixl."
    )


def new_id(*, one_host: bool) -> bytes:
    """Return the id of a new world, of which this process will be PE 0.

    Raises NotImplementedError as `library` and WorldLibrary.new_id do, and ConnectionError when
    there is none to be had.
    """
    try:
        return library().new_id(one_host=one_host)
    except NotImplementedError:
        raise
    except RuntimeError as error:
        raise ConnectionError(str(error)) from error


def join(world: World, pe: int, shapes: Shapes) -> SymmetricEndpoints:
    """Return the first device of this process as a PE of the world, when all members have come.

    Raises NotImplementedError as `library` and WorldLibrary.join do, and ConnectionError when the
    world does not begin.
    """
    device = jax.local_devices()[0]
    number, slot_bytes = (
        device.local_hardware_id or 0,
        max(shapes.request_slot, shapes.response_slot),
    )
    try:
        return library().join(
            number,
            pe,
            world.size,
            world.id,
            slot_bytes,
            servers=world.ranks,
            one_host=world.one_host,
        )
    except NotImplementedError:
        raise
    except RuntimeError as error:
        raise ConnectionError(f"PE {pe} of {world.size}: {error}") from error
