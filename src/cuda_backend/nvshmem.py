"""A GPU in a world of NVSHMEM: the transport between GPUs of several hosts, by IBGDA.

Ends, kernels and waits are those of `peer`; but what a kernel writes for its peer lies in staging
memory of its own GPU, and a launch behind it puts it into the peer's landing slot
(csrc_nvshmem/forward.cuh). The world is fixed when it begins: a process that has ended does not
come back into it, and the others go on without it. NVSHMEM is found as NVIDIA's package, and built
against at first use; nothing of it is here.
"""

import ctypes
import functools
import importlib.util
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from cuda_backend import ffi, toolkit
from cuda_backend.peer import PeerDevice
from cuda_backend.peer_channel import PAGE, Channel
from cuda_backend.peer_endpoints import ClientEndpoint, ServerEndpoint
from lora_jax.ops import dispatch, native
from lora_jax.ops.acting_call import acting_call
from lora_jax.typing import Array, Int

ID_BYTES = 128
_PREFIX = "lora_jax_cuda_nvshmem_"
FORWARD_AFTER = _PREFIX + "forward_after"
_ROUTE = struct.Struct("<QQQii")  # csrc_nvshmem/forward.cuh
_I32, _I64, _U64, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_CALLS = {
    "id": (_I32, _P),
    "init": (_I32, _I32, _I32, _P, _I32),
    "heap": (_U64, _U64),
    "new": (_I64, _P, _U64, _I32),
    "load": (_I32,),
    "forward": (_I32, _I64, _P),
}
_SAID = re.compile(r"pe (\d{1,9}) turn (\d{1,9})")
_TURNS = 4  # slots of each pair, used in turn: who joins anew does not land where it did before
_HOST_LIBRARY = "libnvshmem_host.so.3"
# Of the bootstrap and the transports; what the user has set stays.
ONE_HOST = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
SEVERAL_HOSTS = {"NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_IB_ENABLE_IBGDA": "1"}


def calls_of(made: ctypes.CDLL) -> native.Calls:
    """Return the C calls of the library of csrc_nvshmem."""
    return native.Calls(made, _PREFIX, _CALLS)


def package() -> Path:
    """Return the folder of NVIDIA's package. Raises NotImplementedError where it is not."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if Path(folder, "lib", _HOST_LIBRARY).exists():
            return Path(folder)
    raise NotImplementedError(
        "The transport by NVSHMEM needs the package nvidia-nvshmem-cu13; install it, or use GPUs "
        "of one host, which need none."
    )


def library(folder: Path) -> native.Library:
    """Return the kernel, to be built against the package in `folder`."""
    root = Path(__file__).parent
    headers = [root / "csrc" / name for name in ("peer/state.cuh", "device/ptx.cuh")]
    return native.Library(
        name="nvshmem",
        title="NVSHMEM kernels",
        compilers=toolkit.find_compilers(),
        wanted=toolkit.WANTED,
        flags=(
            *ffi.FLAGS,
            "-rdc=true",
            f"-I{folder / 'include'}",
            f"-L{folder / 'lib'}",
            "-lnvshmem_device",
            "-Xlinker",
            f"-l:{_HOST_LIBRARY}",
        ),
        includes=(root / "csrc",),
        sources=(
            *headers,
            root / "csrc_nvshmem" / "forward.cuh",
            root / "csrc_nvshmem" / "forward.cu",
        ),
        unit=".cu",
        targets=(FORWARD_AFTER,),
        platform="CUDA",
    )


@functools.cache
def _calls() -> native.Calls:
    ffi.require()
    folder = package()
    # Before the kernels, which name it, and for the plugins that it loads itself.
    ctypes.CDLL(str(folder / "lib" / _HOST_LIBRARY), mode=ctypes.RTLD_GLOBAL)
    try:
        return calls_of(library(folder).load(dispatch.cache_folder()))
    except native.BuildError as error:
        raise NotImplementedError(str(error)) from error


def new_id(calls: native.Calls | None = None) -> bytes:
    """Return the id of a new world, which all of its PEs are given.

    PE 0's process must make it: it listens there until all PEs have joined. Raises RuntimeError.
    """
    buffer = ctypes.create_string_buffer(ID_BYTES)
    if code := (calls or _calls()).id(buffer):
        raise RuntimeError(f"nvshmemx_get_uniqueid: {code}")
    return buffer.raw


def configure(*, one_host: bool) -> None:
    """Set what NVSHMEM reads when a world begins, where the user has not."""
    for name, value in (ONE_HOST if one_host else SEVERAL_HOSTS).items():
        os.environ.setdefault(name, value)


class SymmetricChannel(Channel):
    """Slots in staging memory and in the symmetric heap; they stay until the process ends."""

    def __init__(self, request: int, response: int, peer: int, target: int):
        """`request` and `response` are where the counters' pages begin; `peer` is the other PE, in
        whose heap messages land at `target`.
        """
        self.request_counter, self.response_counter = request, response
        self.request_slot, self.response_slot = request + PAGE, response + PAGE
        self.peer, self.target = peer, target

    def share(self) -> "SymmetricChannel":
        return self

    def close(self) -> None:
        pass


class NvshmemDevice(PeerDevice):
    """One GPU as an endpoint of transports to all PEs of its world."""

    def __init__(
        self,
        number: int,
        rank: int,
        size: int,
        world: bytes,
        slot_bytes: int,
        *,
        servers: int | None = None,
        calls: native.Calls | None = None,
        peer: PeerDevice | None = None,
    ):
        """Join the world `world` (`new_id`) of `size` PEs as PE `rank`; all of them must come.

        `slot_bytes` is the size of the largest slot, equal on all PEs, as is `servers`: where PEs
        below that exchange with the others only, there are slots for these pairs alone. Raises
        NotImplementedError without NVSHMEM, and RuntimeError when the world does not begin.
        """
        if peer is None:
            super().__init__(number)
        else:
            super().__init__(number, peer.calls, peer.device)
        self.rank, self.size = rank, size
        self.forwards = calls or _calls()
        self._room = -(-(PAGE + slot_bytes) // PAGE) * PAGE
        self._servers = 0 if servers is None else servers
        self._senders = max(self._servers, size - self._servers)  # that a PE has slots for
        with self.device.current():
            if code := self.forwards.init(rank, size, world, number):
                raise RuntimeError(f"NVSHMEM does not begin as PE {rank} of {size}: error {code}")
            if code := self.forwards.load():
                raise NotImplementedError(f"the NVSHMEM kernel does not load: CUDA error {code}")
            num_bytes = 2 * self._senders * _TURNS * self._room
            self._heap = self.forwards.heap(num_bytes)
        if not self._heap:
            raise RuntimeError(f"NVSHMEM has no {num_bytes} bytes for slots")
        self._turn = 0

    @property
    def identity(self) -> str:
        """Return the number of the PE: what a server must know of a client's device."""
        return f"pe {self.rank}"

    def create_channel(
        self, client: str, request_bytes: int, response_bytes: int, *, pull: bool, local: bool
    ) -> tuple[Channel, list[int]]:
        """Return the channel to the client that says so, and no descriptors.

        Raises ValueError for what is no PE of this world, and for larger slots.
        """
        match = _SAID.fullmatch(client)
        if match is None or pull or local:
            raise ValueError(f"{client!r} is no PE of this world.")
        pe, turn = map(int, match.groups())
        staging, landing = self._meet(pe, turn, request_bytes, response_bytes)
        return SymmetricChannel(landing, staging, pe, self._place(self.rank, turn)), []

    def next_turn(self) -> str:
        """Return what a client says of itself when it joins a server."""
        self._turn += 1
        return f"{self.identity} turn {self._turn}"

    def channel_to(self, server: int, request_bytes: int, response_bytes: int) -> Channel:
        """Return the channel to the server on this PE that was joined in the last turn."""
        turn = self._turn
        staging, landing = self._meet(server, turn, request_bytes, response_bytes)
        return SymmetricChannel(staging, landing, server, self._place(self.rank, turn))

    def new_client(self, numbers: ctypes.Array, servers: int) -> "NvshmemClientEndpoint":
        return NvshmemClientEndpoint(self, numbers, servers)

    def new_server(self, numbers: ctypes.Array) -> "NvshmemServerEndpoint":
        return NvshmemServerEndpoint(self, numbers)

    def _meet(self, peer: int, turn: int, *slots: int) -> tuple[int, int]:
        """Return where messages to a PE are staged and where its own land, both of them empty."""
        is_pair = (peer < self._servers) != (self.rank < self._servers) or not self._servers
        if not (is_pair and 0 <= peer < self.size) or PAGE + max(slots) > self._room:
            raise ValueError(f"PE {peer} with slots of {max(slots)} bytes is not of this world.")
        landing = self._place(peer, turn)
        staging = landing + self._senders * _TURNS * self._room
        for address in (staging, landing):
            self.device.zero(address, PAGE)
        return staging, landing

    def _place(self, sender: int, turn: int) -> int:
        """Return the address at which a PE's messages land in the receiver's heap."""
        place = sender if sender < self._servers else sender - self._servers
        return self._heap + (place * _TURNS + turn % _TURNS) * self._room


class _Forwarding:
    """The routes of an endpoint, and the launches that send what its kernels have staged."""

    def __init__(self, device: NvshmemDevice, numbers: ctypes.Array):
        self._gpu, self._calls_out = device.device, device.forwards
        self._routes = device.device.allocate(_ROUTE.size * device.size)
        self.number = device.forwards.new(numbers, self._routes, device.size)
        if not self.number:
            raise ValueError(
                "The kernels take at most 4 sites of 4 outputs each (csrc/peer/state.cuh)."
            )

    def open(self, channel: SymmetricChannel, staging: int) -> None:
        """Send what is staged at `staging` to the channel's PE from now on."""
        route = _ROUTE.pack(staging, channel.target, 0, channel.peer, 0)
        self._gpu.write(self._routes + channel.peer * _ROUTE.size, route)

    def after(self, x: Array) -> Array:
        """Traced: return x, behind the launch."""
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = acting_call(FORWARD_AFTER, out, input_output_aliases={0: 0})
        return call(x, end=np.int64(self.number))

    def now(self, stream: ctypes.c_void_p) -> None:
        """Launch, and wait for it."""
        with self._gpu.current():
            if code := self._calls_out.forward(self.number, stream):
                raise RuntimeError(f"the kernel forward cannot be launched: CUDA error {code}")
            self._gpu.cuda.call("cuStreamSynchronize", stream)


class NvshmemClientEndpoint(ClientEndpoint):
    """See peer.ClientEndpoint. Rows leave in the stream of the step, never in another."""

    def __init__(self, device: NvshmemDevice, numbers: ctypes.Array, servers: int):
        super().__init__(device.calls, device.device, numbers, servers)
        self._forwarding = _Forwarding(device, numbers)

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
        del separate_stream, lasting
        return self._forwarding.after(super().push(x, layer, rows, site, separate_stream=False))

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
        del separate_stream
        return super().wait_add(ys, keep, rows, servers, site, separate_stream=False)

    def attach(self, server: int, channel: Channel, epoch: int) -> None:
        assert isinstance(channel, SymmetricChannel), "a channel of another transport"
        self._forwarding.open(channel, channel.request_counter)
        super().attach(server, channel, epoch)


class NvshmemServerEndpoint(ServerEndpoint):
    """See peer.ServerEndpoint."""

    def __init__(self, device: NvshmemDevice, numbers: ctypes.Array):
        super().__init__(device.calls, device.device, numbers)
        self._forwarding = _Forwarding(device, numbers)

    def attach(self, client: int, channel: Channel, epoch: int) -> int:
        assert isinstance(channel, SymmetricChannel), "a channel of another transport"
        self._forwarding.open(channel, channel.response_counter)
        return super().attach(client, channel, epoch)

    def respond(self, link: int, site: int, deltas: Sequence[np.ndarray] | None) -> None:
        super().respond(link, site, deltas)
        self._forwarding.now(self._stream)

    def answer(
        self,
        info: Int[Array, "messages 8"],
        verdicts: Int[Array, "messages"],
        deltas: Sequence[Array],
        site: int,
    ) -> Int[Array, "messages 8"]:
        return self._forwarding.after(super().answer(info, verdicts, deltas, site))


class Nvshmem:
    """The library as a transport chooses it by the entry point `lora_jax.transport_world`."""

    def new_id(self, *, one_host: bool) -> bytes:
        """Return the id of a new world, of which this process will be PE 0."""
        configure(one_host=one_host)
        return new_id()

    def join(
        self,
        device: int,
        pe: int,
        size: int,
        world: bytes,
        slot_bytes: int,
        *,
        servers: int,
        one_host: bool,
    ) -> NvshmemDevice:
        """Return a GPU of this process as a PE of the world; see NvshmemDevice for the errors."""
        configure(one_host=one_host)
        return NvshmemDevice(device, pe, size, world, slot_bytes, servers=servers)
