"""Endpoints over mapped memory, between two processes or within one; for CPUs."""

import copy
import ctypes
import dataclasses
import mmap
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.ops.acting_call import acting_call
from lora_jax.typing import Array, Float, Int
from serving.lora_server.transport.base import (
    AbstractClient,
    ClientStats,
    PushRows,
    Request,
    TransportError,
)
from serving.lora_server.transport.checks import check_outputs, check_push
from serving.lora_server.transport.client_base import AbstractClientBase, AbstractConnector
from serving.lora_server.transport.header import HEADER_BYTES, Header, Kind, parse
from serving.lora_server.transport.library import PUSH, WAIT_ADD, calls, numbers, shared_memory
from serving.lora_server.transport.server_base import AbstractServerBase
from serving.lora_server.transport.shapes import PAGE, Shapes

_NUM_COUNTS, _NUM_LENGTHS = 9, 64  # csrc/client.h


@dataclasses.dataclass(frozen=True)
class Joined:
    """Client's handle of a server: two descriptors, for the client to close, and an epoch."""

    channel: int
    bell: int
    epoch: int


class SlotClient(AbstractClientBase[Joined]):
    """A client whose landing slots the C++ handlers read and write. See AbstractClient."""

    def __init__(
        self,
        shapes: Shapes,
        connectors: Sequence[AbstractConnector[Joined]],
        *,
        pull: bool,
        late: bool = False,
    ):
        """Join every server. Raises TransportError, with nothing kept, if one is not there.

        With `pull`, results are read over before they are used: for comparison only. Servers that
        come `late` are lost until a `rejoin`.
        """
        super().__init__(shapes, connectors)
        self._calls = calls()
        self._number = self._calls.client_new(numbers(shapes), self.servers, int(pull), 0)
        self._join_all(late=late)

    def push(
        self, x: Float[Array, "rows d_in"], site: int, layer: Int[Array, ""] | int, rows: PushRows
    ) -> Float[Array, "rows d_in"]:
        self._check(site, x, rows)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = acting_call(PUSH, out, input_output_aliases={0: 0})
        return call(
            x,
            rows.num_rows,
            jnp.asarray(layer, jnp.int32),
            rows.table_version,
            rows.row_to_server,
            rows.row_to_adapter,
            rows.row_to_expert,
            client=np.int64(self._number),
            site=np.int64(site),
        )

    def wait_add(
        self,
        ys: Sequence[Float[Array, "rows _"]],
        keep: Float[Array, "rows d_in"],
        site: int,
        rows: PushRows,
    ) -> tuple[tuple[Float[Array, "rows _"], ...], Int[Array, "servers"]]:
        self._check(site, keep, rows)
        check_outputs(self.shapes, site, keep, ys)
        outs = [jax.ShapeDtypeStruct((self.servers,), jnp.int32)]
        outs += [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in ys]
        aliases = {3 + index: 1 + index for index in range(len(ys))}
        call = acting_call(WAIT_ADD, outs, input_output_aliases=aliases)
        status, *added = call(
            rows.num_rows,
            rows.row_to_server,
            keep,
            *ys,
            client=np.int64(self._number),
            site=np.int64(site),
        )
        return tuple(added), status

    def grouped(self, clients: Sequence[AbstractClient]) -> "SlotClient":
        members = [client._number for client in clients if isinstance(client, SlotClient)]
        assert len(members) == len(clients), "clients of several transports"
        group = copy.copy(self)
        group._number = self._calls.client_group(
            (ctypes.c_int64 * len(members))(*members), len(members)
        )
        return group

    def abort(self, on: bool = True) -> None:
        self._calls.client_abort(self._number, int(on))

    def lost(self) -> tuple[int, ...]:
        lost = self._calls.client_lost
        return tuple(server for server in range(self.servers) if lost(self._number, server))

    def stats(self) -> ClientStats:
        counts = (ctypes.c_uint64 * (_NUM_COUNTS + _NUM_LENGTHS))()
        self._calls.client_counts(self._number, counts)
        return stats_of(counts)

    def close(self) -> None:
        self._closed = True
        self._calls.client_free(self._number)
        for connector in self._connectors:
            connector.leave()

    def _limit(self, nanoseconds: int) -> None:
        self._calls.client_limit(self._number, nanoseconds)

    def _join(self, server: int) -> None:
        connector = self._connectors[server]
        connector.leave()
        joined = connector.join(self._epochs[server])
        epoch = self._epochs[server] = joined.epoch
        try:
            attach = self._calls.client_attach
            if not attach(self._number, server, joined.channel, joined.bell, epoch):
                raise TransportError(f"the slots of server {server} cannot be mapped")
            detach = self._calls.client_detach
            connector.watch(joined, lambda: detach(self._number, server, epoch))
        finally:
            os.close(joined.channel)
            os.close(joined.bell)

    def _check(self, site: int, x: Array, rows: PushRows) -> None:
        if jax.default_backend() != "cpu":
            raise NotImplementedError(
                f"These slots are host memory: a program on {jax.default_backend()} needs another "
                "transport."
            )
        check_push(self.shapes, site, x, rows)


def stats_of(numbers: Sequence[int] | ctypes.Array) -> ClientStats:
    """Return the counts of a client as its native end gives them: see csrc/client.h."""
    *counts, waited, longest = numbers[:_NUM_COUNTS]
    return ClientStats(
        *counts,
        wait_seconds=waited / 1e9,
        longest_wait=longest / 1e9,
        waits_by_length=tuple(numbers[_NUM_COUNTS:]),
    )


class _ClientSlots:
    """The server's own view of one client's slots; gone when the last array over it is."""

    def __init__(self, shapes: Shapes, channel: int, epoch: int):
        memory = mmap.mmap(channel, shapes.channel_bytes)
        start, rows = PAGE, shapes.max_rows
        ids = {"dtype": np.int32, "count": rows}
        self.epoch = epoch
        self.adapters = np.frombuffer(memory, offset=start + shapes.adapters_offset, **ids)
        self.experts = np.frombuffer(memory, offset=start + shapes.experts_offset, **ids)
        at = start + shapes.rows_offset
        self.x = [
            np.frombuffer(memory, shapes.row_dtype, rows * site.d_in, at).reshape(rows, site.d_in)
            for site in shapes.sites
        ]


class SlotServer(AbstractServerBase[_ClientSlots]):
    """A server whose clients' slots the C++ code reads and writes. See AbstractServer."""

    def __init__(self, shapes: Shapes, *, pull: bool):
        """With `pull`, messages are read over before they are used: for comparison only."""
        super().__init__(shapes)
        self._pull = pull
        self._calls = calls()
        self._bell = shared_memory(PAGE)
        self._number = self._calls.server_new(numbers(shapes), self._bell)
        self._header = ctypes.create_string_buffer(HEADER_BYTES)

    @property
    def number(self) -> int:
        """Number by which the C++ code knows the server."""
        return self._number

    def join(self, last_epoch: int) -> tuple[int, Joined]:
        """Make room for a client; return its number and what to give it, for it to close.

        Raises TransportError when the server is closed, and where memory cannot be mapped.
        """
        with self._lock:
            if self._closed:
                raise TransportError("the server is closed")
            epoch = self._next_epoch(last_epoch)
            channel = shared_memory(self.shapes.channel_bytes)
            client = self._calls.server_attach(self._number, channel, epoch)
            if not client:
                os.close(channel)
                raise TransportError("a client's slots cannot be mapped")
            self._seats[client] = _ClientSlots(self.shapes, channel, epoch)
            return client, Joined(channel, os.dup(self._bell), epoch)

    def leave(self, client: int) -> None:
        """Forget a client; its slots go when nobody reads them any more."""
        with self._lock:
            self._calls.server_detach(self._number, client)
            self._seats.pop(client, None)

    def receive(self, seconds: float) -> Request | None:
        client = self._calls.server_receive(self._number, int(seconds * 1e9), self._header)
        seat = self._seats.get(client)
        header = parse(self._header.raw) if seat else None
        if seat is None or header is None:
            return None
        arrays = seat.x[header.site], seat.adapters, seat.experts
        if self._pull:
            arrays = tuple(_fetched(array, header.rows) for array in arrays)
        return Request(
            client,
            header.epoch,
            header.sequence,
            header.layer,
            header.site,
            header.rows,
            header.table_version,
            *arrays,
        )

    def abort(self) -> None:
        self._aborted = True
        self._calls.server_abort(self._number)

    def dropped(self) -> int:
        return self._calls.server_dropped(self._number)

    def _answer(self, request: Request, deltas: Sequence[np.ndarray] | None) -> bool:
        kind, pointers = Kind.REFUSAL, None
        if deltas is not None:
            kind, pointers = Kind.RESPONSE, (ctypes.c_void_p * len(deltas))()
            pointers[:] = [delta.ctypes.data for delta in deltas]
        header = Header(
            request.epoch,
            request.sequence,
            request.layer,
            request.site,
            0 if deltas is None else request.rows,
            kind,
            request.table_version,
            0,  # filled in
        )
        answer = self._calls.server_answer
        return bool(answer(self._number, request.client, header.pack(), pointers))

    def _free(self) -> None:
        self._calls.server_free(self._number)
        os.close(self._bell)


def _fetched(array: np.ndarray, rows: int) -> np.ndarray:
    """Return memory of this process with the array's first rows."""
    copy = np.empty_like(array)
    copy[:rows] = array[:rows]
    return copy
