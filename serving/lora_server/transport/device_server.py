"""A server whose landing slots are in the memory of devices.

It is used in two ways: as any AbstractServer, rows travelling over the host's memory, or inside
programs of its device (`take`, `answer`), where messages are taken, computed and answered without
the host. No program may be under way during `receive`; what programs leave, the host answers.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Float, Int
from serving.lora_server.transport.base import Request, TransportError
from serving.lora_server.transport.device_endpoints import Channel, DeviceEndpoints
from serving.lora_server.transport.library import numbers
from serving.lora_server.transport.server_base import AbstractServerBase
from serving.lora_server.transport.shapes import Shapes

MOST_MESSAGES = 8  # that a program takes at once
_INFO_WORDS = 8  # that it says of each
_DROPPED = 6  # its place among the counts


@dataclasses.dataclass(frozen=True)
class _DeviceClient:
    """One client as the server's host sees it."""

    index: int  # among the kernels' links
    channel: Channel
    epoch: int
    link: int


def no_ticket(messages: int = MOST_MESSAGES) -> np.ndarray:
    """Return what the first `take` of programs with so many messages each is behind."""
    return np.zeros((messages, _INFO_WORDS), np.int32)


class Verdict(enum.IntEnum):
    """Verdict of a program on a message."""

    REFUSE = 0
    ANSWER = 1
    LEAVE = 2  # to the host: see DeviceServer.left


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrived:
    """Messages of one site inside a program of the server's device, from a client each.

    Their rows lie one behind the other. Client and site -1: no more messages came in time.
    """

    info: Int[Array, "messages 8"]
    adapters: Int[Array, "max_rows"]  # -1 behind the real rows
    experts: Int[Array, "max_rows"]
    row_to_message: Int[Array, "max_rows"]  # -1 there too

    @property
    def clients(self) -> Int[Array, "messages"]:
        return self.info[:, 0]

    @property
    def site(self) -> Int[Array, ""]:
        return self.info[0, 1]

    @property
    def layers(self) -> Int[Array, "messages"]:
        return self.info[:, 2]

    @property
    def rows(self) -> Int[Array, ""]:
        """Return how many there are of all messages."""
        return jnp.sum(self.info[:, 3])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RankTable:
    """Adapters of a rank by place: an adapter's number modulo the number of places."""

    numbers: Int[Array, "places"]
    slots: Int[Array, "places"]
    num_ready: Int[Array, "places"]  # layers of the model that are here, from the lowest
    version: Int[Array, ""]
    layers: Int[Array, "layers"]  # of the plan, as the model numbers them; -1: of another rank


@dataclasses.dataclass(frozen=True)
class Share:
    """Experts of a rank, and its count of the slots of a row's layer."""

    first_expert: int
    num_experts: int
    slots_per_layer: int  # in one table of all layers; 0: each layer's begin at 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Judged:
    """Verdicts on messages, and slots of their rows: -1 where nothing is to be added."""

    messages: Arrived
    row_to_slot: Int[Array, "max_rows"]
    verdicts: Int[Array, "messages"]


class Found(enum.IntEnum):
    """Result of a look for messages."""

    ALL_WELL = 0  # there were some, and all are answered
    NOTHING = 1
    LEFT = 2  # one or more of them to the host


class Word(enum.IntEnum):
    """Places of numbers in the info of judged messages; the last two are in its first line."""

    VERDICT = 5
    ANSWERS = 6  # so far, of this look and those before
    FOUND = 7


class DeviceServer(AbstractServerBase[_DeviceClient]):
    """A rank of the LoRA Server whose kernels read and write the slots. See AbstractServer."""

    def __init__(self, shapes: Shapes, endpoints: DeviceEndpoints, *, pull: bool):
        """With `pull`, messages stay at their sender's device until they are read."""
        super().__init__(shapes)
        self._endpoints, self._pull = endpoints, pull
        self._endpoint = endpoints.new_server(numbers(shapes))
        self._buffers: dict[int, list[np.ndarray]] = {}  # of messages under way, by number
        self._last_client = 0

    def join(
        self, last_epoch: int, device: str, *, local: bool
    ) -> tuple[int, Channel, list[int], int]:
        """Make room for a client; return its number, channel, two descriptors and epoch.

        The descriptors are the caller's to close; with `local` the channel too. Raises
        TransportError when the server is closed or full, and where the device cannot be reached.
        """
        with self._lock:
            free = set(range(self._endpoint.most_peers)) - {s.index for s in self._seats.values()}
            if self._closed or not free:
                raise TransportError("the server is closed" if self._closed else "it is full")
            sizes = self.shapes.request_slot, self.shapes.response_slot
            try:
                channel, fds = self._endpoints.create_channel(
                    device, *sizes, pull=self._pull, local=local
                )
            except (ValueError, MemoryError) as error:
                raise TransportError(f"a client's slots cannot be made: {error}") from error
            epoch = self._next_epoch(last_epoch)
            self._last_client += 1
            index = min(free)
            if local:
                channel.share()
            link = self._endpoint.attach(index, channel, epoch)
            self._seats[self._last_client] = _DeviceClient(index, channel, epoch, link)
            return self._last_client, channel, fds, epoch

    def leave(self, client: int) -> None:
        """Forget a client."""
        with self._lock:
            seat = self._seats.pop(client, None)
            self._buffers.pop(client, None)
            if seat is not None and not self._closed:
                self._endpoint.detach(seat.index)

    def take(
        self, after: Int[Array, "messages 8"], limit_us: Int[Array, ""] | int, site: int
    ) -> tuple[Arrived, Float[Array, "max_rows d_in"]]:
        """Traced: a site's next messages of any clients, in turn, and their rows.

        Behind what gave `after`: in as many messages as that has lines and as fit `max_rows` what
        waits, or the first one to come within as many microseconds, which are data; no longer than
        until one of another site is there, for programs that take sites in turns.
        """
        spec = self.shapes.sites[site]
        shape = jax.ShapeDtypeStruct((self.shapes.max_rows, spec.d_in), self.shapes.row_dtype)
        *fields, x = self._endpoint.take(after, jnp.asarray(limit_us, jnp.int32), site, shape)
        return Arrived(*fields), x

    def judge(
        self, messages: Arrived, before: Int[Array, "messages 8"], table: RankTable, share: Share
    ) -> Judged:
        """Traced: what of messages is answered, by the table of the rank that has this share.

        A message is answered where the rank has all that its rows want, and else left to the host,
        which may know a newer table. `before` is the info of the messages before: the counts go on.
        """
        arrived = messages.info, messages.adapters, messages.experts, messages.row_to_message
        tables = table.numbers, table.slots, table.num_ready, table.version, table.layers
        info, *others = self._endpoint.judge(before, arrived, tables, **dataclasses.asdict(share))
        return Judged(dataclasses.replace(messages, info=info), *others)

    def answer(
        self,
        messages: Arrived,
        verdicts: Int[Array, "messages"],
        deltas: Sequence[Array],
        site: int,
    ) -> Arrived:
        """Traced: push [rows or more, d_out] for each output of a site, or as the verdicts say.

        Messages of another site are left alone. Raises ValueError for deltas that do not fit; none
        at all will do where no message is answered.
        """
        spec, dtype = self.shapes.sites[site], self.shapes.result_dtype
        got = [(d.shape[1:], d.dtype) for d in deltas]
        if deltas and got != [((width,), dtype) for width in spec.d_outs]:
            raise ValueError(f"{spec.name} answers in {dtype} of widths {spec.d_outs}, got {got}.")
        info = self._endpoint.answer(messages.info, verdicts.astype(jnp.int32), deltas, site)
        return dataclasses.replace(messages, info=info)

    def left(self, info: Sequence[int]) -> Request | None:
        """Return a message that a program left, for `respond` or `refuse`; None: its client went.

        `info` is the message's line of the program's `Arrived`.
        """
        index, site, layer, rows, version = info[:5]
        with self._lock:
            at = next((n for n, s in self._seats.items() if s.index == index), None)
            if at is None:
                return None
            seat = self._seats[at]
            if at not in self._buffers:
                self._buffers[at] = _buffers(self.shapes)
            *xs, adapters, experts = self._buffers[at]
        self._fetch(seat, (xs[site], adapters, experts), rows)
        return Request(at, seat.epoch, 0, layer, site, rows, version, xs[site], adapters, experts)

    def receive(self, seconds: float) -> Request | None:
        message = None if self._aborted else self._endpoint.receive(int(seconds * 1e9))
        return None if message is None else self.left(message)

    def abort(self) -> None:
        self._aborted = True
        with self._lock:
            if not self._closed:
                self._endpoint.stop(True)

    def pause(self, on: bool) -> None:
        """Let programs find no message, and wait for none, until pause(False); from any thread."""
        with self._lock:
            if not (self._closed or self._aborted):
                self._endpoint.stop(on)

    def dropped(self) -> int:
        return self._endpoint.counts()[_DROPPED]

    def _free(self) -> None:
        self._endpoint.close()

    def _fetch(self, seat: _DeviceClient, arrays: Sequence[np.ndarray], rows: int) -> None:
        shapes, slot = self.shapes, seat.channel.request_slot
        offsets = (shapes.rows_offset, shapes.adapters_offset, shapes.experts_offset)
        for array, offset in zip(arrays, offsets, strict=True):
            self._endpoint.fetch(slot + offset, array[:rows])

    def _answer(self, request: Request, deltas: Sequence[np.ndarray] | None) -> bool:
        with self._lock:
            seat = self._seats.get(request.client)
            if seat is None or seat.epoch != request.epoch or self._closed:
                return False
            self._endpoint.respond(seat.link, request.site, deltas)
            return True


def _buffers(shapes: Shapes) -> list[np.ndarray]:
    """Return host memory for a message: each site's rows, adapters, experts."""
    rows = shapes.max_rows
    buffers = [_aligned((rows, site.d_in), shapes.row_dtype) for site in shapes.sites]
    return [*buffers, _aligned((rows,), np.dtype(np.int32)), _aligned((rows,), np.dtype(np.int32))]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros at an address that XLA uses without a copy."""
    count = int(np.prod(shape))
    data = np.zeros(count * dtype.itemsize + 64, np.uint8)
    start = -data.ctypes.data % 64
    return data[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
