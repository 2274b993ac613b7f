"""Choice of the transport between an instance and a LoRA Server of one host.

By default ("auto") the one of the device's memory; "nixl" where it is to be as between hosts.
"""

from collections.abc import Sequence
from pathlib import Path

import jax

from serving.lora_server.transport import device_endpoints, device_memory, nixl, shared_memory
from serving.lora_server.transport.base import AbstractClient, AbstractServer
from serving.lora_server.transport.compatibility import Terms

AUTO, NIXL = TRANSPORTS = ("auto", "nixl")


def open_server(path: str | Path, terms: Terms, rank: int, transport: str = AUTO) -> AbstractServer:
    """Return a server that clients of this user and host find at the Unix socket `path`.

    On a CPU its slots are shared memory, else they are in the memory of the devices. Raises
    ValueError as shared_memory.open_server does, and NotImplementedError where the device has no
    such transport, or where it has not the one that is asked for.
    """
    if transport == NIXL:
        _require_host_memory()
        return nixl.open_server(path, terms, rank)
    if jax.default_backend() == "cpu":
        return shared_memory.open_server(path, terms, rank)
    return device_memory.open_server(path, terms, rank, _endpoints())


def open_client(
    paths: Sequence[str | Path],
    terms: Terms,
    transport: str = AUTO,
    *,
    separate_stream: bool = True,
    device: int = 0,
) -> AbstractClient:
    """Return a client of the servers at `paths`; see handshake.open_client for the errors.

    It is that of one `device` of this process, by its number. For `separate_stream`, which is for
    devices' memory, see DeviceClient.
    """
    if transport == NIXL:
        _require_host_memory()
        return nixl.open_client(paths, terms)
    if jax.default_backend() == "cpu":
        return shared_memory.open_client(paths, terms)
    return device_memory.open_client(
        paths, terms, _endpoints(device), separate_stream=separate_stream
    )


def _require_host_memory() -> None:
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"The transport nixl has its slots in host memory: a program on "
            f"{jax.default_backend()} needs --lora-server-transport auto."
        )


def _endpoints(number: int = 0) -> device_endpoints.DeviceEndpoints:
    """Return the endpoints of a device that this process computes on."""
    device = jax.local_devices()[number]
    return device_endpoints.for_platform(device.platform, device.local_hardware_id or 0)
