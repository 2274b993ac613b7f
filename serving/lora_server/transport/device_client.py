"""A client whose landing slots are in the memory of devices, and whose kernels write and wait."""

import abc
import copy
import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from lora_jax.typing import Array, Float, Int
from serving.lora_server.transport.base import (
    AbstractClient,
    ClientStats,
    PushRows,
    TransportError,
)
from serving.lora_server.transport.checks import check_outputs, check_push
from serving.lora_server.transport.client_base import AbstractClientBase, AbstractConnector
from serving.lora_server.transport.device_endpoints import Channel, ClientEndpoint, DeviceEndpoints
from serving.lora_server.transport.library import numbers
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.slots import Joined, stats_of


@dataclasses.dataclass(frozen=True)
class Landed:
    """Client's handle of a server: a channel that the client closes, and an epoch."""

    channel: Channel
    epoch: int
    joined: Joined | None = None  # by a handshake


class AbstractCalledConnector(AbstractConnector[Landed]):
    """Joins a server of another process by a handshake; a final class finds the channel to it."""

    def __init__(self, caller: AbstractConnector[Joined], shapes: Shapes):
        self._caller, self._shapes = caller, shapes

    @abc.abstractmethod
    def channel_of(self, joined: Joined, request_bytes: int, response_bytes: int) -> Channel:
        """Return the channel, with slots of these sizes. Raises TransportError."""

    def join(self, last_epoch: int) -> Landed:
        joined, shapes = self._caller.join(last_epoch), self._shapes
        try:
            channel = self.channel_of(joined, shapes.request_slot, shapes.response_slot)
        except TransportError:
            self._caller.leave()
            raise
        return Landed(channel, joined.epoch, joined)

    def watch(self, landed: Landed, lost: Callable[[], None]) -> None:
        assert landed.joined is not None, "not joined by a handshake"
        self._caller.watch(landed.joined, lost)

    def leave(self) -> None:
        self._caller.leave()


class DeviceClient(AbstractClientBase[Landed]):
    """A client whose kernels read and write the slots. See AbstractClient."""

    def __init__(
        self,
        shapes: Shapes,
        connectors: Sequence[AbstractConnector[Landed]],
        endpoints: DeviceEndpoints,
        *,
        separate_stream: bool,
        late: bool = False,
    ):
        """Join every server. Raises TransportError, with nothing kept, if one is not there.

        With `separate_stream` rows leave, and answers are waited for, on a stream of their own
        while the base computes; without they may be part of a CUDA graph. Servers that come `late`
        are lost until a `rejoin`.
        """
        super().__init__(shapes, connectors)
        self._separate_stream = separate_stream
        self._endpoint: ClientEndpoint = endpoints.new_client(numbers(shapes), self.servers)
        self._join_all(late=late)

    def push(
        self, x: Float[Array, "rows d_in"], site: int, layer: Int[Array, ""] | int, rows: PushRows
    ) -> Float[Array, "rows d_in"]:
        check_push(self.shapes, site, x, rows)
        # A layer that a program computes may be gone while a separate stream still reads it.
        options = {"separate_stream": self._separate_stream, "lasting": isinstance(layer, int)}
        return self._endpoint.push(x, jnp.asarray(layer, jnp.int32), _fields(rows), site, **options)

    def wait_add(
        self,
        ys: Sequence[Float[Array, "rows _"]],
        keep: Float[Array, "rows d_in"],
        site: int,
        rows: PushRows,
    ) -> tuple[tuple[Float[Array, "rows _"], ...], Int[Array, "servers"]]:
        check_push(self.shapes, site, keep, rows)
        check_outputs(self.shapes, site, keep, ys)
        wait = self._endpoint.wait_add
        return wait(
            ys, keep, _fields(rows), self.servers, site, separate_stream=self._separate_stream
        )

    def grouped(self, clients: Sequence[AbstractClient]) -> "DeviceClient":
        ends = [client._endpoint for client in clients if isinstance(client, DeviceClient)]
        assert len(ends) == len(clients), "clients of several transports"
        group = copy.copy(self)
        group._endpoint = self._endpoint.grouped(ends)
        return group

    def abort(self, on: bool = True) -> None:
        self._endpoint.stop(on)

    def lost(self) -> tuple[int, ...]:
        ended = self._endpoint.ended
        return tuple(n for n, epoch in enumerate(self._epochs) if not epoch or ended(n, epoch))

    def stats(self) -> ClientStats:
        return stats_of(self._endpoint.counts())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for connector in self._connectors:
            connector.leave()
        self._endpoint.close()

    def _limit(self, nanoseconds: int) -> None:
        self._endpoint.limit(nanoseconds)

    def _join(self, server: int) -> None:
        connector = self._connectors[server]
        connector.leave()
        self._endpoint.detach(server)
        landed = connector.join(self._epochs[server])
        epoch = self._epochs[server] = landed.epoch
        self._endpoint.attach(server, landed.channel, epoch)
        connector.watch(landed, lambda: self._endpoint.end(server, epoch))


def _fields(rows: PushRows) -> tuple[Array, ...]:
    """Return the arrays of a map in the order that an endpoint takes them."""
    routes = (rows.row_to_server, rows.row_to_adapter, rows.row_to_expert)
    return (rows.num_rows, rows.table_version, *routes)
