"""A GPU as an endpoint of the transport between GPUs: channels in shared device memory.

`serving.lora_server.transport.device_memory` drives it by the entry point `lora_jax.transport`.
"""

import ctypes
import functools
import os
from collections.abc import Sequence

from cuda_backend import ffi
from cuda_backend.peer_channel import PAGE, Channel
from cuda_backend.peer_endpoints import ClientEndpoint, ServerEndpoint, calls_of
from cuda_backend.peer_memory import Device, Landing, create_landing, import_landing
from lora_jax.ops import dispatch, native


@functools.cache
def _calls() -> native.Calls:
    ffi.require()
    path = ffi.library().build(dispatch.cache_folder())
    return calls_of(ctypes.CDLL(str(path)))  # the one that XLA has: the same path, loaded once


class PeerDevice:
    """One GPU as an endpoint of transports."""

    def __init__(
        self, number: int, calls: native.Calls | None = None, device: Device | None = None
    ):
        """`number` counts the GPUs that this process sees.

        Raises NotImplementedError where there is no such GPU, or no kernels for it.
        """
        self.calls = calls or _calls()
        self.device = device or Device(number)
        with self.device.current():
            if code := self.calls.load():
                raise NotImplementedError(f"the transport's kernels do not load: CUDA error {code}")

    @property
    def identity(self) -> str:
        """Return the GPU's UUID: what a server must know of a client's."""
        return self.device.identity

    def create_channel(
        self, client: str, request_bytes: int, response_bytes: int, *, pull: bool, local: bool
    ) -> tuple[Channel, list[int]]:
        """Return a channel to the client on the GPU `client`, and two descriptors for it.

        The descriptors are the caller's to close. With `local` the client is in this process and
        shares the mapping. Raises ValueError where this GPU cannot reach that one.
        """
        device, number = self.device, self.device.number_of(client)
        users = sorted({device.number, number}) if local else [device.number]
        sizes = (response_bytes, request_bytes) if pull else (request_bytes, response_bytes)
        landings: list[Landing] = []
        fds: list[int] = []
        try:
            for home, size in zip((device.number, number), sizes, strict=True):
                landing, fd = create_landing(device, home, PAGE + size, users)
                landings.append(landing)
                fds.append(fd)
        except BaseException:
            _drop(landings, fds)
            raise
        return Channel(landings[0], landings[1], pull), fds

    def import_channel(
        self, fds: Sequence[int], request_bytes: int, response_bytes: int, *, pull: bool
    ) -> Channel:
        """Return the channel of a server in another process; the descriptors stay the caller's.

        Raises ValueError for memory of other sizes.
        """
        sizes = (response_bytes, request_bytes) if pull else (request_bytes, response_bytes)
        landings: list[Landing] = []
        try:
            for fd, size in zip(fds, sizes, strict=True):
                landings.append(import_landing(self.device, fd, PAGE + size))
        except BaseException:
            _drop(landings, [])
            raise
        return Channel(landings[0], landings[1], pull)

    def new_client(self, numbers: ctypes.Array, servers: int) -> "ClientEndpoint":
        """Return an endpoint that pushes to `servers` servers, none of them attached yet.

        `numbers` are those of the transport's library.numbers. Raises ValueError for more than the
        kernels take.
        """
        return ClientEndpoint(self.calls, self.device, numbers, servers)

    def new_server(self, numbers: ctypes.Array) -> "ServerEndpoint":
        """Return an endpoint without clients; errors as new_client."""
        return ServerEndpoint(self.calls, self.device, numbers)


def _drop(landings: Sequence[Landing], fds: Sequence[int]) -> None:
    for landing in landings:
        landing.close()
    for fd in fds:
        os.close(fd)
