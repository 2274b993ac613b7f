"""Endpoints of tenants: one adapter in a process of its own, and the engine that all answer.

A tenant owns the memory of its channel and shows it to the engine alone, so that no tenant sees
another one's rows. Rows come and deltas go without Python: the tenant's loop is C++ (csrc/tenant.h)
and calls the kernel by which an engine computes its own slots, so that the bits are those.
"""

import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable

import numpy as np

from lora_jax.memory.wire import receive_fds, send_fds
from lora_jax.ops.cpu.build import rows_address
from lora_jax.ops.native import BuildError
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.client_base import FIRST_LIMIT, AbstractClientBase
from serving.lora_server.transport.library import calls, check_memory, numbers, shared_memory
from serving.lora_server.transport.shapes import PAGE, Shapes
from serving.lora_server.transport.slots import SlotClient, SlotServer
from serving.lora_server.transport.socket_messages import wait_for_end

# As csrc/tenant.h has it.
MAP = np.dtype(
    [
        ("a", np.uint64),
        ("b", np.uint64),
        ("a_rows", np.int64),
        ("b_rows", np.int64),
        ("rank", np.int32),
        ("a_stride", np.int32),
        ("b_stride", np.int32),
        ("scaling", np.float32),
    ]
)


@dataclasses.dataclass(frozen=True)
class Seat:
    """An engine's means to reach a tenant: three descriptors, its to close, and the epoch.

    `life` is an end of a socket pair whose other end ends with the tenant.
    """

    channel: int
    bell: int
    life: int
    epoch: int


def prepare() -> None:
    """Build and load the C++ ends; a process in a jail runs no compiler, so its parent does.

    Raises NotImplementedError where they cannot be built.
    """
    try:
        rows_address()
        calls()
    except BuildError as error:
        raise NotImplementedError(
            f"isolation 'server' needs the C++ kernels, which cannot be built ({error}): install "
            "a C++ compiler, or use isolation 'process'."
        ) from error


class TenantServer:
    """One adapter's side: answers the rows of one engine."""

    def __init__(self, shapes: Shapes, maps: np.ndarray, keep: object):
        """`maps` [layers, outputs of all sites in order] of MAP hold addresses within `keep`.

        Raises NotImplementedError where the CPU kernels cannot be built.
        """
        outputs = sum(len(site.d_outs) for site in shapes.sites)
        if maps.dtype != MAP or maps.shape != (shapes.layers, outputs):
            raise ValueError(f"maps must be [{shapes.layers}, {outputs}], got {maps.shape}.")
        self._maps, self._keep = np.ascontiguousarray(maps), keep
        prepare()
        self._server = SlotServer(shapes, pull=False)
        self._life: socket.socket | None = None

    def join(self, last_epoch: int) -> Seat:
        """Return a seat for the engine, under an epoch above `last_epoch`."""
        client, joined = self._server.join(last_epoch)
        del client
        self._life, theirs = socket.socketpair()
        given = self._life, joined.epoch
        threading.Thread(target=self._take_ring, args=given, name="ring", daemon=True).start()
        return Seat(joined.channel, joined.bell, theirs.detach(), joined.epoch)

    def run(self) -> int:
        """Answer until `stop`; return how many messages were answered."""
        tenant = calls().server_tenant
        return tenant(self._server.number, self._maps.ctypes.data, rows_address())

    def stop(self) -> None:
        """End `run` soon; any thread may call."""
        self._server.abort()

    def close(self) -> None:
        """Give the memory back, after `run` has returned."""
        self._server.close()
        if self._life is not None:
            with contextlib.suppress(OSError):
                self._life.shutdown(socket.SHUT_RDWR)

    def _take_ring(self, life: socket.socket, epoch: int) -> None:
        """Sleep on the engine's ring from the moment on at which the engine shows it."""
        with life:
            with contextlib.suppress(OSError, TransportError):  # then it has a bell of its own
                (ring,) = receive_fds(life, 1)
                try:
                    check_memory(ring, PAGE)
                    calls().server_ring(self._server.number, ring, epoch)
                finally:
                    os.close(ring)
            wait_for_end(life)  # this end, open, says that the tenant lives


class TenantClient(SlotClient):
    """An engine's side of all its tenants; a seat without one is lost. See AbstractClient.

    Each tenant counts alone: one that does not answer costs the others its wait, once, and none of
    their bits.
    """

    def __init__(self, shapes: Shapes, seats: int):
        """`seats` is the most tenants at a time."""
        AbstractClientBase.__init__(self, shapes, [])
        self.servers, self._epochs = seats, [0] * seats
        prepare()
        self._calls = calls()
        self._ring: int | None = shared_memory(PAGE)
        self._number = self._calls.client_new(numbers(shapes), seats, 0, 1)
        if not self._calls.client_ring(self._number, self._ring):
            self._calls.client_free(self._number)
            os.close(self._ring)
            raise TransportError("the memory by which tenants are woken cannot be mapped")
        self._lives: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self.set_limit(FIRST_LIMIT)

    def sit(self, number: int, seat: Seat, gone: Callable[[], None]) -> None:
        """Give a tenant a seat number; `gone` is called, on a thread, when it has ended.

        Closes the descriptors. Raises TransportError for memory that is not as agreed, and for an
        epoch that is not above those of the seat's tenants before.
        """
        life = socket.socket(fileno=seat.life)
        try:
            check_memory(seat.channel, self.shapes.channel_bytes)
            check_memory(seat.bell, PAGE)
            with self._lock:
                if seat.epoch <= self._epochs[number]:
                    raise TransportError(
                        f"seat {number} has had epoch {self._epochs[number]}, and is offered "
                        f"{seat.epoch}: it is a copy of an old one."
                    )
                attach = self._calls.client_attach
                if not attach(self._number, number, seat.channel, seat.bell, seat.epoch):
                    raise TransportError(f"the memory of seat {number} cannot be mapped")
                self._epochs[number], self._lives[number] = seat.epoch, life
                if self._ring is not None:
                    with contextlib.suppress(OSError):  # it has gone, as the thread below sees
                        send_fds(life, [self._ring])
        except BaseException:
            life.close()
            raise
        finally:
            os.close(seat.channel)
            os.close(seat.bell)
        args = life, number, seat.epoch, gone
        threading.Thread(target=self._watch, args=args, name="tenant", daemon=True).start()

    def last_epoch(self, number: int) -> int:
        """Return the epoch of a seat's last tenant."""
        return self._epochs[number]

    def is_lost(self, number: int) -> bool:
        """True if nobody answers in a seat."""
        return bool(self._calls.client_lost(self._number, number))

    def rise(self, number: int) -> None:
        """Let a tenant go; its seat is lost from now on."""
        with self._lock:
            life = self._lives.get(number)
        if life is not None:
            with contextlib.suppress(OSError):
                life.shutdown(socket.SHUT_RDWR)

    def rejoin(self) -> tuple[int, ...]:
        """Return the lost seats: a tenant comes back by itself."""
        return self.lost()

    def close(self) -> None:
        super().close()
        with self._lock:
            numbers_ = list(self._lives)
            ring, self._ring = self._ring, None
        if ring is not None:
            os.close(ring)
        for number in numbers_:
            self.rise(number)

    def _watch(
        self, life: socket.socket, number: int, epoch: int, gone: Callable[[], None]
    ) -> None:
        wait_for_end(life)
        self._calls.client_detach(self._number, number, epoch)
        with self._lock:
            if self._lives.get(number) is life:
                del self._lives[number]
        life.close()
        gone()
