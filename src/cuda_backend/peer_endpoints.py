"""A client and a server of the transport on a GPU: its custom calls, and its links.

The kernels (csrc/peer/client.cuh, csrc/peer/server.cuh) read and step all state on the device; here
the host attaches channels, takes them away, and looks at counts.
"""

import copy
import ctypes
import dataclasses
import struct
import threading
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend.peer_channel import Channel
from cuda_backend.peer_memory import Device
from lora_jax.ops import native
from lora_jax.ops.acting_call import acting_call
from lora_jax.typing import Array, Int

INFO_WORDS = 8  # of a message: client, site, layer, rows, table version; see csrc/peer/server.cuh
_PREFIX = "lora_jax_cuda_peer_"
_LINK = struct.Struct("<QQQQQ88x")  # two slots and counters, and the epoch; csrc/peer/state.cuh
_RECORDS = 4  # of each peer, used in turn
_RESPONSE_SLOT = 8  # where its bytes stand in serving.lora_server.transport.library.numbers()
_MOST_OUTS = 4  # csrc/peer/state.cuh
# A kernel that was enqueued before its link was taken away may still read it: no unmapping sooner.
_RETIRE_S = 5.0
_I32, _I64, _U64, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_CALLS = {
    "new": (_I64, _P, _I64, _U64),
    "group": (_I64, _P, _I64),
    "layout": (None, _P),
    "load": (_I32,),
    "receive": (_I32, _I64, _U64, _P, _P),
    "respond": (_I32, _I64, _U64, _P, _P, _I64, _P),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Bytes and offsets of what kernels and host share, as the compiler laid it out."""

    state_bytes: int
    control: int
    stopped: int
    links: int
    counts: int
    link_bytes: int
    control_bytes: int
    most_peers: int
    num_counts: int
    num_lengths: int


def calls_of(library: ctypes.CDLL) -> native.Calls:
    """Return the C calls of the library with the transport's kernels."""
    return native.Calls(library, _PREFIX, _CALLS)


def layout_of(calls: native.Calls) -> Layout:
    """Return what a library's compiler laid out."""
    numbers = (_I64 * len(dataclasses.fields(Layout)))()
    calls.layout(numbers)
    return Layout(*numbers)


class _Endpoint:
    """State on the device, and the links in it. The host's calls come from any thread."""

    def __init__(self, calls: native.Calls, device: Device, numbers: ctypes.Array, servers: int):
        layout = layout_of(calls)
        self._calls, self._device, self._layout = calls, device, layout
        self.most_peers = layout.most_peers
        if servers > self.most_peers:
            raise ValueError(f"The kernels take {self.most_peers} servers, not {servers}.")
        # Compiled programs may name this state as long as the process lives, so it stays.
        records = layout.most_peers * _RECORDS * layout.link_bytes
        self._state = device.allocate(layout.state_bytes + records)
        self._control = device.allocate_host(layout.control_bytes)
        device.write(self._state + layout.control, struct.pack("<Q", self._control))
        with device.current():
            self.number = calls.new(numbers, servers, self._state)
        if not self.number:
            raise ValueError(
                "The endpoint could not be created: the kernels take at most 4 sites of 4 outputs "
                "each (csrc/peer/state.cuh), and need a CUDA stream."
            )
        self._turns = [0] * layout.most_peers
        self._channels: dict[int, Channel] = {}
        self._retired: list[tuple[float, Channel]] = []
        self._lock = threading.Lock()

    def stop(self, on: bool) -> None:
        """End waits under way and those to come, until stop(False)."""
        self._word(0).value = int(on)  # for kernels that spin
        self._device.write(self._state + self._layout.stopped, struct.pack("<Q", int(on)))

    def counts(self) -> list[int]:
        """Return the kernels' counts, in the order of csrc/peer/state.cuh."""
        size = self._layout.num_counts + self._layout.num_lengths
        data = self._device.read(self._state + self._layout.counts, 8 * size)
        return list(struct.unpack(f"<{size}Q", data))

    def close(self) -> None:
        """Let nobody in, and unmap everything when what runs on the device has ended."""
        self.stop(True)
        for peer in list(self._channels):
            self.detach(peer)
        self._sweep(wait=True)

    def detach(self, peer: int) -> None:
        """Let the kernels find no link to this peer any more."""
        with self._lock:
            self._write_link(peer, 0)
            channel = self._channels.pop(peer, None)
            if channel is not None:
                self._retired.append((time.monotonic(), channel))

    def _attach(self, peer: int, channel: Channel, slots: Sequence[int], epoch: int) -> int:
        """Give the kernels a link, whose channel belongs to this end now; return its address."""
        self.detach(peer)
        self._sweep(wait=False)
        with self._lock:
            turn = self._turns[peer] = (self._turns[peer] + 1) % _RECORDS
            record = self._state + self._layout.state_bytes
            record += (peer * _RECORDS + turn) * self._layout.link_bytes
            self._device.write(record, _LINK.pack(*slots, epoch))
            self._write_link(peer, record)
            self._channels[peer] = channel
        return record

    def _sweep(self, *, wait: bool) -> None:
        """Unmap what no kernel can touch any more."""
        now = time.monotonic()
        with self._lock:
            due = [c for at, c in self._retired if wait or now - at > _RETIRE_S]
            self._retired = [(at, c) for at, c in self._retired if c not in due]
        if due:
            self._device.settle()
        for channel in due:
            channel.close()

    def _write_link(self, peer: int, record: int) -> None:
        self._device.write(self._state + self._layout.links + 8 * peer, struct.pack("<Q", record))

    def _word(self, index: int) -> ctypes.c_uint64:
        """Return a word of the memory that spinning kernels look at: see PeerControl."""
        return ctypes.c_uint64.from_address(self._control + 8 * index)


_LIMIT_WORD, _GONE_WORDS = 1, 2


class ClientEndpoint(_Endpoint):
    """GPU endpoint of an instance's rank. `push` and `wait_add` are traced."""

    def push(
        self,
        x: Array,
        layer: Array,
        rows: Sequence[Array],
        site: int,
        *,
        separate_stream: bool,
        lasting: bool = True,
    ) -> Array:
        """Return x; `rows` are num_rows, table_version, row_to_server, ..._adapter, ..._expert.

        With `separate_stream` it goes from a stream of its own, where answers are waited for too:
        all arrays are then read until the sum. Unless the layer is `lasting` only the wait is
        there.
        """
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        name = _PREFIX + ("push_aside" if separate_stream else "push")
        call = acting_call(name, out, input_output_aliases={0: 0})
        num_rows, version, *routes = rows
        which = {"end": np.int64(self.number), "site": np.int64(site)}
        which |= {"lasting": np.int64(lasting)} if separate_stream else {}
        return call(x, num_rows, layer, version, *routes, **which)

    def wait_add(
        self,
        ys: Sequence[Array],
        keep: Array,
        rows: Sequence[Array],
        servers: int,
        site: int,
        *,
        separate_stream: bool,
    ) -> tuple[tuple[Array, ...], Array]:
        """Return ys plus what came back, and int32 [servers]; options as for push."""
        outs = [jax.ShapeDtypeStruct((servers,), jnp.int32)]
        outs += [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in ys]
        aliases = {3 + index: 1 + index for index in range(len(ys))}
        name = _PREFIX + ("wait_add_aside" if separate_stream else "wait_add")
        call = acting_call(name, outs, input_output_aliases=aliases)
        num_rows, version, row_to_server, *owners = rows
        kept = (version, *owners) if separate_stream else ()
        which = {"end": np.int64(self.number), "site": np.int64(site)}
        status, *added = call(num_rows, row_to_server, keep, *ys, *kept, **which)
        return tuple(added), status

    def grouped(self, ends: Sequence["ClientEndpoint"]) -> "ClientEndpoint":
        """Return what programs over devices trace: each device's calls are those of its end."""
        group = copy.copy(self)
        members = (_I64 * len(ends))(*(end.number for end in ends))
        group.number = self._calls.group(members, len(ends))
        return group

    def attach(self, server: int, channel: Channel, epoch: int) -> None:
        """Push to this server from now on; the channel belongs to this end."""
        slots = (channel.request_slot, channel.request_counter)
        self._attach(
            server, channel, (*slots, channel.response_slot, channel.response_counter), epoch
        )

    def end(self, server: int, epoch: int) -> None:
        """The server of this epoch has gone: a wait for it ends at once."""
        word = self._word(_GONE_WORDS + server)
        word.value = max(word.value, epoch)

    def ended(self, server: int, epoch: int) -> bool:
        """True if the server of this epoch has gone, or was lost by a wait."""
        kernels = self._word(_GONE_WORDS + self.most_peers + server).value
        return max(self._word(_GONE_WORDS + server).value, kernels) >= epoch

    def limit(self, nanos: int) -> None:
        """Bound every later wait."""
        self._word(_LIMIT_WORD).value = nanos


class ServerEndpoint(_Endpoint):
    """GPU endpoint of a server's rank: two ways to take messages, of which it uses one.

    `receive` and `respond` move rows over the host; `take` and `answer` are traced, for a program
    that takes messages, computes and answers without the host.
    """

    def __init__(self, calls: native.Calls, device: Device, numbers: ctypes.Array):
        super().__init__(calls, device, numbers, 0)
        self._info = self._device.allocate_host(4 * INFO_WORDS + 4)  # and whether to answer
        self._stream = self._device.new_stream()  # of kernels that spin: copies have another
        self._num_staged = numbers[_RESPONSE_SLOT]
        self._staging = 0  # made when first needed

    def attach(self, client: int, channel: Channel, epoch: int) -> int:
        """Take this client's messages from now on; return what `respond` knows it by."""
        slots = (channel.response_slot, channel.response_counter)
        return self._attach(
            client, channel, (*slots, channel.request_slot, channel.request_counter), epoch
        )

    def receive(self, nanos: int) -> tuple[int, ...] | None:
        """Return (client, site, layer, rows, table version) of the next message, or None."""
        self._launch("receive", nanos, self._info)
        message = tuple((_I32 * 5).from_address(self._info))
        return None if message[0] < 0 else message

    def respond(self, link: int, site: int, deltas: Sequence[np.ndarray] | None) -> None:
        """Push results, C-contiguous arrays, to the client of a link; None refuses."""
        ok = _I32.from_address(self._info + 4 * INFO_WORDS)
        ok.value = deltas is not None
        pointers = (_U64 * _MOST_OUTS)(*self._stage(deltas or []))
        self._launch("respond", link, ctypes.addressof(ok), pointers, site)

    def fetch(self, address: int, array: np.ndarray) -> None:
        """Fill an array from a slot."""
        self._device.copy_out(array.ctypes.data, address, array.nbytes)

    def take(
        self,
        after: Int[Array, "messages 8"],
        limit_us: Int[Array, ""],
        site: int,
        shape: jax.ShapeDtypeStruct,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return (info, adapters, experts, row_to_message, rows) of a site's messages, by clients.

        `after` is what the call before gave. As many messages as that has lines, of at most as many
        rows together as `shape`, [rows, d_in], has: behind the real rows adapters and messages are
        -1, behind the messages clients are. None came within `limit_us`, or one waits that is of
        another site: then all are.
        """
        ids = jax.ShapeDtypeStruct(shape.shape[:1], jnp.int32)
        outs = [jax.ShapeDtypeStruct(after.shape, jnp.int32), ids, ids, ids, shape]
        call = acting_call(_PREFIX + "take", outs)
        info, *outputs = call(after, limit_us, end=np.int64(self.number), site=np.int64(site))
        adapters, experts, messages, x = outputs
        return info, adapters, experts, messages, x

    def judge(
        self,
        before: Int[Array, "messages 8"],
        arrived: Sequence[Array],
        table: Sequence[Array],
        *,
        first_expert: int,
        num_experts: int,
        slots_per_layer: int,
    ) -> tuple[Array, Array, Array]:
        """Return (info, row_to_slot, verdicts) of what `take` gave: see csrc/peer/judge.cuh.

        `before` is the info of the messages before; `table` is numbers, slots and ready layers by
        place, the version, and the layers of the plan.
        """
        info, adapters, *others = arrived
        verdicts = jax.ShapeDtypeStruct(info.shape[:1], jnp.int32)
        outs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (info, adapters)]
        call = jax.ffi.ffi_call(
            _PREFIX + "judge", [*outs, verdicts], input_output_aliases={1: 0, 2: 1}
        )
        which = {"first_expert": first_expert, "num_experts": num_experts}
        which |= {"slots_per_layer": slots_per_layer}
        numbers = {name: np.int64(value) for name, value in which.items()}
        lines, row_to_slot, verdicts = call(before, info, adapters, *others, *table, **numbers)
        return lines, row_to_slot, verdicts

    def answer(
        self,
        info: Int[Array, "messages 8"],
        verdicts: Int[Array, "messages"],
        deltas: Sequence[Array],
        site: int,
    ) -> Int[Array, "messages 8"]:
        """Return info, when the messages' clients have their results, if they are of this site.

        Verdict 0 refuses and needs no deltas, 1 answers, 2 leaves the message for later.
        """
        out = jax.ShapeDtypeStruct(info.shape, info.dtype)
        call = acting_call(_PREFIX + "answer", out, input_output_aliases={0: 0})
        which = {"end": np.int64(self.number), "site": np.int64(site)}
        return call(info, verdicts, *deltas, **which)

    def _stage(self, deltas: Sequence[np.ndarray]) -> list[int]:
        """Copy results to the device; return where they lie."""
        if not self._staging:
            self._staging = self._device.allocate(self._num_staged)
        places, at = [], self._staging
        for delta in deltas:
            if delta.nbytes:
                self._device.copy_in(at, delta.ctypes.data, delta.nbytes)
            places.append(at)
            at += -(-delta.nbytes // 64) * 64
        return places

    def _launch(self, name: str, *arguments) -> None:
        """Launch a kernel of the library on this end's stream, and wait for it."""
        with self._device.current():
            if code := getattr(self._calls, name)(self.number, *arguments, self._stream):
                raise RuntimeError(f"the kernel {name} cannot be launched: CUDA error {code}")
            self._device.cuda.call("cuStreamSynchronize", self._stream)
