"""The contract between an LLM instance and a LoRA Server, whatever carries the bytes.

A client is one rank of an LLM instance, a server one rank of the LoRA Server. For every pair there
is one landing slot in each direction, owned by its receiver and written by its sender only
(InfiniLoRA, section 5.1: push in both directions, no rendezvous). One exchange is

    x = client.push(x, site, layer, rows)                # copies the rows that have an adapter
    y = base(x)                                          # runs meanwhile
    (y,), status = client.wait_add((y,), x, site, rows)  # adds what came back

inside a jitted step of one device. `push` gives x back and the base computation must consume that;
`wait_add` consumes its result: data alone keeps the order. At most one exchange of a client is
under way.

What travels. Only rows with row_to_server[row] >= 0 do, packed, in their order; base rows and
padding never, and they come back bit-unchanged. A server without rows gets no message, is not
waited for, and the pair's sequence is not stepped, so a step of base rows costs nothing.

Failure. A wait is bounded. Unless every server of the exchange answered, no y changes, by not one
bit, and `status` says which failed. A server that once did not answer in time is lost: later
pushes skip it and later waits give ABORTED at once, so that a step waits for it once. Only
`rejoin`, under a new epoch with new slots, brings it back; late writes of the old epoch go to
memory that nobody reads. A refusal (`AbstractServer.refuse`) fails one exchange and loses nothing.

Other transports (NIXL, NVSHMEM) are further pairs of these two classes. `keep` is for those that
read x after push has returned.
"""

import abc
import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.typing import Array, Float, Int
from serving.lora_server.transport.shapes import Shapes


class Status(enum.IntEnum):
    """Outcome of a wait for one server; 0 also where nothing was sent to it."""

    ARRIVED = 0
    TIMED_OUT = 1
    ABORTED = 2  # by the host, or the server was lost before
    REFUSED = 3  # the server answered that it cannot: an adapter or a table it does not have


class TransportError(ConnectionError):
    """The other side is not there, or does not speak as this package does."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PushRows:
    """Destinations of rows of [rows, d_in]; the same object for push and wait_add of an exchange.

    Only the first `num_rows` rows are real. `row_to_server` is -1 for rows that stay. The adapter
    number is whatever client and server mean by it at `table_version`.
    """

    num_rows: Int[Array, ""]
    table_version: Int[Array, ""]
    row_to_server: Int[Array, "rows"]
    row_to_adapter: Int[Array, "rows"]
    row_to_expert: Int[Array, "rows"]


def push_rows(
    placement: ServerLayout,
    layer: int,
    row_to_adapter: Int[Array, "rows"],
    row_to_expert: Int[Array, "rows"],
    num_rows: Int[Array, ""],
    table_version: Int[Array, ""],
) -> PushRows:
    """Return where the rows of one layer go by the plan; rows of adapter -1 stay.

    `layer` counts the layers of the plan. Rows sorted by expert go to a server as one range, less
    the base rows in it.
    """
    if placement.dp > 1:
        server = row_to_adapter % placement.dp
    else:
        server = placement.group_of(layer).start + row_to_expert // placement.experts_per_device
    server = jnp.where(row_to_adapter < 0, -1, server).astype(jnp.int32)
    return PushRows(num_rows, table_version, server, row_to_adapter, row_to_expert)


@dataclasses.dataclass(frozen=True)
class ClientStats:
    """Counts of one client since it was made, over all servers and epochs."""

    pushes: int  # messages that left
    bytes_sent: int
    waits: int  # answers waited for
    timed_out: int
    aborted: int
    refused: int
    dropped: int  # arrivals whose header was not accepted
    wait_seconds: float  # of waits, which may go on beside the base computation
    longest_wait: float  # seconds
    waits_by_length: tuple[int, ...]  # of [2^i, 2^(i+1)) ns, of exchanges that ended well

    def wait_quantile(self, share: float) -> float:
        """Return seconds that `share` of the waits stayed below, by a power of two; 0 if none.

        A bound for later waits may be 20 times that of 0.99, and 2 ms at least.
        """
        wanted, seen = share * sum(self.waits_by_length), 0
        for index, count in enumerate(self.waits_by_length):
            seen += count
            if count and seen >= wanted:
                return 2 ** (index + 1) / 1e9
        return 0.0


class AbstractClient(abc.ABC):
    """One rank of an LLM instance. `push` and `wait_add` are traced, the rest is for the host."""

    shapes: Shapes
    servers: int

    @abc.abstractmethod
    def push(
        self, x: Float[Array, "rows d_in"], site: int, layer: Int[Array, ""] | int, rows: PushRows
    ) -> Float[Array, "rows d_in"]:
        """Return x, after its rows were copied to their servers' landing slots.

        Raises ValueError while tracing where x does not fit the site. Rows of a server or a layer
        that the client does not have fail the program, by name, where the host runs it; on a
        device nothing is sent then, and the wait gives ABORTED.
        """

    @abc.abstractmethod
    def wait_add(
        self,
        ys: Sequence[Float[Array, "rows _"]],
        keep: Float[Array, "rows d_in"],
        site: int,
        rows: PushRows,
    ) -> tuple[tuple[Float[Array, "rows _"], ...], Int[Array, "servers"]]:
        """Return ys plus what came back, y[row] = round(y[row] + delta[row]), and the statuses.

        Sums are in float32. In place where ys are temporaries. Waits for all servers of the
        exchange together, at most the limit of `set_limit`.
        """

    @abc.abstractmethod
    def grouped(self, clients: Sequence["AbstractClient"]) -> "AbstractClient":
        """Return what programs over devices trace: each device pushes and waits by its own client.

        `clients`, of one kind and this one among them, are by the device's number. Only `push` and
        `wait_add` of the result are used; the clients stay the caller's.
        """

    @abc.abstractmethod
    def set_limit(self, seconds: float) -> None:
        """Bound every later wait."""

    @abc.abstractmethod
    def abort(self, on: bool = True) -> None:
        """End the waits under way with ABORTED, and those to come, until abort(False).

        A server that was being waited for is lost by it.
        """

    @abc.abstractmethod
    def lost(self) -> tuple[int, ...]:
        """Return the servers that are not connected, ascending."""

    @abc.abstractmethod
    def rejoin(self) -> tuple[int, ...]:
        """Try once to connect each lost server, under a new epoch; return those still lost.

        Blocks for a bounded time. Between steps, or on a thread of its own: a step under way then
        has the statuses of what it missed.
        """

    @abc.abstractmethod
    def stats(self) -> ClientStats:
        """Return the counts so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back; later pushes send nothing. A second call does nothing."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A message as it lies in its landing slot, read and bounds-checked; valid until answered.

    `x`, `adapters` and `experts` are views of the slot's `rows` real rows, `padded` of more.
    """

    client: int
    epoch: int
    sequence: int
    layer: int
    site: int
    rows: int
    table_version: int
    slot_x: np.ndarray  # [max_rows, d_in]; rows behind the real ones are leftovers
    slot_adapters: np.ndarray  # int32 [max_rows]
    slot_experts: np.ndarray  # int32 [max_rows]

    @property
    def x(self) -> np.ndarray:
        """[rows, d_in]"""
        return self.slot_x[: self.rows]

    @property
    def adapters(self) -> np.ndarray:
        """int32 [rows], as the client's row_to_adapter; not checked against any table."""
        return self.slot_adapters[: self.rows]

    @property
    def experts(self) -> np.ndarray:
        """int32 [rows], numbers of the model's experts; not checked against any range."""
        return self.slot_experts[: self.rows]

    def padded(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (x, adapters, experts) of the first `rows` rows of the slot, real or not.

        For programs compiled for a few row counts. Addresses are multiples of 64. Raises
        ValueError for fewer than the real rows or more than the slot's.
        """
        if not self.rows <= rows <= len(self.slot_x):
            raise ValueError(f"{rows} rows are not in {self.rows}..{len(self.slot_x)}.")
        return self.slot_x[:rows], self.slot_adapters[:rows], self.slot_experts[:rows]


class AbstractServer(abc.ABC):
    """One rank of the LoRA Server; used by one thread, `close` and `abort` by any."""

    shapes: Shapes

    @abc.abstractmethod
    def receive(self, seconds: float) -> Request | None:
        """Return the next message of any client, in turn; None after `seconds` or when aborted.

        Messages with a header that is not accepted are dropped and counted.
        """

    @abc.abstractmethod
    def respond(self, request: Request, deltas: Sequence[np.ndarray]) -> bool:
        """Push the results back: [rows or more, d_out] for each output of the request's site.

        False if the client has gone, or has given this request up by joining anew. Raises
        ValueError for results that do not fit the site.
        """

    @abc.abstractmethod
    def refuse(self, request: Request) -> bool:
        """Tell the client at once that there will be no result: its wait gives REFUSED."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Let `receive` return None from now on."""

    @abc.abstractmethod
    def aborted(self) -> bool:
        """Return whether `abort` or `close` was called."""

    @abc.abstractmethod
    def clients(self) -> tuple[int, ...]:
        """Return the numbers of the connected clients."""

    @abc.abstractmethod
    def dropped(self) -> int:
        """Return how many messages were dropped for their headers."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop, and give everything back. A second call does nothing."""
