"""Clients of an instance whose model is split over devices: one for each device."""

import dataclasses
import functools
import operator
from collections.abc import Sequence

from lora_jax.typing import Array, Float, Int
from serving.lora_server.transport.base import AbstractClient, ClientStats, PushRows


class SplitClient(AbstractClient):
    """Several clients as one: in a program over devices each of them uses its own.

    To a server they are clients of their own. A server that one of them has lost is lost.
    """

    def __init__(self, clients: Sequence[AbstractClient]):
        """`clients` are by the device's number, of one transport and to the same servers."""
        self._clients = tuple(clients)
        self.shapes, self.servers = clients[0].shapes, clients[0].servers
        self._traced = clients[0].grouped(clients)

    def push(
        self, x: Float[Array, "rows d_in"], site: int, layer: Int[Array, ""] | int, rows: PushRows
    ) -> Float[Array, "rows d_in"]:
        return self._traced.push(x, site, layer, rows)

    def wait_add(
        self,
        ys: Sequence[Float[Array, "rows _"]],
        keep: Float[Array, "rows d_in"],
        site: int,
        rows: PushRows,
    ) -> tuple[tuple[Float[Array, "rows _"], ...], Int[Array, "servers"]]:
        return self._traced.wait_add(ys, keep, site, rows)

    def grouped(self, clients: Sequence[AbstractClient]) -> AbstractClient:
        raise NotImplementedError("these are the clients of all devices already")

    def set_limit(self, seconds: float) -> None:
        for client in self._clients:
            client.set_limit(seconds)

    def abort(self, on: bool = True) -> None:
        for client in self._clients:
            client.abort(on)

    def lost(self) -> tuple[int, ...]:
        return tuple(sorted({server for client in self._clients for server in client.lost()}))

    def rejoin(self) -> tuple[int, ...]:
        return tuple(sorted({server for client in self._clients for server in client.rejoin()}))

    def stats(self) -> ClientStats:
        return functools.reduce(_added, (client.stats() for client in self._clients))

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _added(one: ClientStats, other: ClientStats) -> ClientStats:
    """Return the counts of both."""
    pairs = zip(one.waits_by_length, other.waits_by_length, strict=True)
    added = {
        field.name: operator.add(getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(ClientStats)
        if field.name not in ("longest_wait", "waits_by_length")
    }
    longest = max(one.longest_wait, other.longest_wait)
    return ClientStats(
        **added, longest_wait=longest, waits_by_length=tuple(a + b for a, b in pairs)
    )
