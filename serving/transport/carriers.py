"""Choice of the transport between an instance and a LoRA Server of one host.

By default ("auto") the one of the device's memory; "nixl" where it is to be as between hosts.
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from serving.transport import device_ends, device_memory, nixl, shared_memory
from serving.transport.base import AbstractClient, AbstractServer
from serving.transport.terms import Terms

AUTO, NIXL = CARRIERS = ("auto", "nixl")


def open_server(path: str | Path, terms: Terms, rank: int, carrier: str = AUTO) -> AbstractServer:
    """Return a server that clients of this user and host find at the Unix socket `path`.

    On a CPU its slots are shared memory, else they are in the memory of the devices. Raises
    ValueError as shared_memory.open_server does, and NotImplementedError where the device has no
    such transport, or where it has not the one that is asked for.
    """
    if carrier == NIXL:
        _require_host_memory()
        return nixl.open_server(path, terms, rank)
    if jax.default_backend() == "cpu":
        return shared_memory.open_server(path, terms, rank)
    return device_memory.open_server(path, terms, rank, _ends())


def open_client(
    paths: Sequence[str | Path], terms: Terms, carrier: str = AUTO, *, aside: bool = True
) -> AbstractClient:
    """Return a client of the servers at `paths`; see handshake.open_client for the errors.

    For `aside`, which is for devices' memory, see DeviceClient.
    """
    if carrier == NIXL:
        _require_host_memory()
        return nixl.open_client(paths, terms)
    if jax.default_backend() == "cpu":
        return shared_memory.open_client(paths, terms)
    return device_memory.open_client(paths, terms, _ends(), aside=aside)


def _require_host_memory() -> None:
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"The carrier nixl has its slots in host memory: a program on {jax.default_backend()} "
            "needs --lora-server-carrier auto."
        )


def _ends() -> device_ends.DeviceEnds:
    """Return the ends of the device that this process computes on."""
    device = jax.local_devices()[0]
    return device_ends.for_platform(device.platform, device.local_hardware_id or 0)
