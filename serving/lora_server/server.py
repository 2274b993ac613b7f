"""One rank of a LoRA Server at work: requests one by one, adapters written in between.

While the device computes for one instance the next one's rows are received and the results of the
one before are sent (InfiniLoRA, section 5.1); a device that takes them itself computes for all that
wait at once.

The loop owns the device. Other threads bring adapters (`load`, `unload`): they read and cut the
files themselves and leave the loop only the writes, a few between two requests.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from lora_jax.adapters import reader
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.typing import Array
from serving.api.load_format import weight_source
from serving.lora_server.device_loop import DeviceLoop
from serving.lora_server.host_parts import HostParts
from serving.lora_server.lease_metrics import PartLoad
from serving.lora_server.rank import ServerRank
from serving.lora_server.read_room import ReadRoom, folder_bytes
from serving.lora_server.shards import shard_part
from serving.lora_server.shared_reads import SharedReads
from serving.lora_server.transport.base import AbstractServer, Request
from serving.lora_server.transport.device_server import DeviceServer
from serving.runtime.compile_counter import CompileCounter

_IDLE_S = 0.01  # how long a command waits at most while no request comes
_FETCHED_S = 0.001  # the same while the next commands are due: parts have been fetched
_CHUNKS = 2  # writes between two requests
_DEPTH = 2  # requests under way; an instance has one at most
_COPYING_S = 0.0002  # between two looks whether a layer has come: copies need Python's lock
# Of a program that takes messages itself, by whether an adapter is being written between programs:
# seconds that it waits for one, and answers that it gives at most. A command ends it at once. While
# one is written, who has caught up with it waits for programs to end.
_PROGRAM = {False: (0.1, 4096), True: (0.0002, 8)}
_GONE = "The rank of the LoRA Server has stopped."


@dataclasses.dataclass(frozen=True)
class RankStats:
    """Counts of one rank since its start."""

    answered: int
    refused: int
    compilations: int  # since it serves; there should be none


class RankServer:
    """One rank over its device and its transport. `run` is the loop; any thread calls the rest."""

    def __init__(
        self,
        rank: ServerRank,
        layers: Sequence[int],
        catalogue: LoraCatalogue,
        make_transport: Callable[[], AbstractServer],
        limits: reader.AdapterReadLimits | None = None,
        host_bytes: int = 0,
        load_format: str = "auto",
    ):
        """`layers` are those of messages, as the model numbers them.

        `catalogue` is the whole base model's, for reading adapters, of which `host_bytes` are
        kept in host memory for the next time; `load_format` as for weight_source.

        `make_transport` is called by `open`: a rank that has come back loads what it should hold
        before instances find it.
        """
        self._rank, self._layers, self._make_transport = rank, tuple(layers), make_transport
        self._transport: AbstractServer | None = None
        self._programs: DeviceLoop | None = None  # where the transport is the device's
        self._catalogue, self._limits = catalogue, limits
        self._parts = HostParts(host_bytes)
        self._read_room, self._reads = ReadRoom(), SharedReads[tuple[AdapterWeights, float]]()
        self._source = weight_source(load_format)
        self._commands: queue.SimpleQueue[tuple[Callable[[], bool], Future[None]]] = (
            queue.SimpleQueue()
        )
        self._loading: dict[int, Future[None]] = {}
        self._under_way: collections.deque[tuple[Request, tuple[Array, ...] | None]] = (
            collections.deque()
        )
        self._waiting: list[Request] = []  # left by programs
        self._version = 0
        self._answered = self._refused = 0
        self._compilations = CompileCounter()
        self._stopping = threading.Event()
        self._stopped = False

    # For other threads.

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self._rank.shard.rank

    def fetch(self, folder: str, digest: str) -> PartLoad:
        """Have the part of the adapter in `folder` in host memory for `load`, until `forget`.

        Several threads may read, each another adapter. Where the parts of others leave no room in
        `host_bytes`, this one is not kept, and `load` reads it again. A `forget` while it is read
        counts. Raises ValueError when the files are refused, are not those of `digest`, or are
        still read for an earlier call after minutes.
        """
        begun = time.monotonic()
        self._parts.expect(digest)
        part, read_s = self._part(folder, digest, self._parts.hold)
        self._parts.hold(part)  # one that was here, too
        return PartLoad(read_s, time.monotonic() - begun)

    def forget(self, digest: str) -> None:
        """Let a part go that was fetched, as far as the host does not keep it for the next time."""
        self._parts.release(digest)

    def load(self, number: int, folder: str, digest: str, version: int) -> PartLoad:
        """Hold the adapter in `folder` under `number`; returns when requests may use it.

        That is when its first layer is here; a request of a later one waits for that. Files that
        were not fetched are read. Raises ValueError when the files are refused, are not those of
        `digest`, have no room, or cannot be copied to the device, and ConnectionError when the rank
        has stopped.
        """
        begun, read_s = time.monotonic(), 0.0
        part = self._parts.held(digest)
        if part is None:
            part, read_s = self._part(folder, digest, self._parts.put)
        self._write(number, part, version)
        return PartLoad(read_s, time.monotonic() - begun)

    def hold(self, number: int, weights: AdapterWeights, version: int = 0) -> None:
        """Hold an adapter that the caller has read; else as `load`."""
        part = shard_part(weights, self._rank.shard, copy=False)
        self._write(number, self._rank.pin(part), version)

    def _write(self, number: int, part: AdapterWeights, version: int) -> None:
        """Have the loop write a part; return when requests may use it. Raises as `load`."""
        done: Future[None] = Future()

        def start() -> bool:
            self._version = max(self._version, version)
            self._rank.start_load(number, part)
            self._loading[number] = done
            return False

        self._submit(start, done).result()

    def unload(self, number: int, version: int) -> None:
        """Hold nothing under `number` from now on. Raises ConnectionError as `load` does."""

        def forget() -> bool:
            self._version = max(self._version, version)
            self._rank.unload(number)
            loading = self._loading.pop(number, None)
            if loading is not None:
                loading.set_exception(ValueError("The adapter was taken away while it loaded."))
            return True

        self._submit(forget).result()

    def open(self) -> None:
        """Let instances connect. Raises what `make_transport` raises."""

        def make() -> bool:
            self._transport = self._make_transport()
            if isinstance(self._transport, DeviceServer):
                self._compilations.ignore_this_thread()
                self._programs = DeviceLoop(self._rank, self._layers, self._transport)
                self._compilations.watch_this_thread()
            return True

        self._submit(make).result()

    def stats(self) -> RankStats:
        """Return the counts so far."""
        with contextlib.suppress(ConnectionError):  # it has stopped: the counts are the last ones
            self._submit(lambda: True).result()  # programs tell what they did when they end
        return RankStats(self._answered, self._refused, self._compilations.count)

    def stop(self) -> None:
        """End `run` soon."""
        self._stopping.set()
        if self._transport is not None:
            self._transport.abort()

    # The loop.

    def run(self) -> None:
        """Serve until `stop`; then refuse commands and close the transport."""
        self._compilations.watch_this_thread()
        try:
            while not self._stopping.is_set():
                self._iterate()
            if self._programs is not None:
                self._programs.drain()
        finally:
            self._compilations.ignore_this_thread()
            self._compilations.close()
            self._stopped = True
            if self._transport is not None:
                self._transport.close()
            self._fail_commands()

    def _iterate(self) -> None:
        if self._programs is not None:
            self._programs.resume()  # whoever brings a command from now on interrupts them
        self._run_commands()
        busy = self._rank.is_loading
        if busy:
            self._advance()
        idle_s, transport = _FETCHED_S if self._parts.any_held else _IDLE_S, self._transport
        if busy:
            idle_s = 0.0
        if transport is None:
            self._stopping.wait(idle_s)
            return
        if isinstance(transport, DeviceServer):
            self._iterate_programs(transport, busy)
            return
        request, under_way = None, self._under_way
        if len(under_way) < _DEPTH:
            request = transport.receive(0.0 if under_way else idle_s)
        if request is not None:
            under_way.append((request, self._compute(request)))
        elif under_way:
            self._answer(transport, *under_way.popleft())

    def _iterate_programs(self, transport: DeviceServer, busy: bool) -> None:
        """Let programs take messages; answer what they left when its layers are here, or refuse it.

        Whoever waits for a layer holds nobody up: programs go on meanwhile.
        """
        assert self._programs is not None, "a server of a device without programs"
        report = self._programs.turn(self._version, *_PROGRAM[busy])
        self._answered += report.answered
        left = (transport.left(line) for line in report.left)
        requests = [*self._waiting, *(request for request in left if request is not None)]
        waits = [self._must_wait(request) for request in requests]
        self._waiting = [request for request, wait in zip(requests, waits, strict=True) if wait]
        for request, wait in zip(requests, waits, strict=True):
            if not wait:
                self._answer(transport, request, self._compute(request))

    def _answer(
        self, transport: AbstractServer, request: Request, deltas: tuple[Array, ...] | None
    ) -> None:
        if deltas is None:
            self._refused += 1
            transport.refuse(request)
        else:
            self._answered += 1
            transport.respond(request, [np.asarray(delta) for delta in deltas])

    def _slots_of(self, request: Request) -> np.ndarray | None:
        """Return the slots of a request's padded rows; None if they are not this rank's to give."""
        shard, rank = self._rank.shard, self._rank
        local = request.experts - shard.first_expert
        has_experts = np.all((local >= 0) & (local < shard.num_experts))
        is_local = self._layers[request.layer] in shard.layers
        if not (has_experts and is_local) or request.table_version > self._version:
            return None
        return rank.slots_of(request.adapters, rank.bucket(request.rows))

    def _must_wait(self, request: Request) -> bool:
        """True if a request can be answered, but not before a layer is here."""
        layer = self._layers[request.layer]
        has_slots = self._slots_of(request) is not None
        return has_slots and self._rank.must_wait(request.adapters, layer)

    def _compute(self, request: Request) -> tuple[Array, ...] | None:
        """Return the request's deltas, when their layer is here; None as `_slots_of`."""
        slots = self._slots_of(request)
        if slots is None:
            return None
        layer = self._layers[request.layer]
        while self._rank.must_wait(request.adapters, layer):
            self._advance()
            self._stopping.wait(_COPYING_S)
        x, _, experts = request.padded(len(slots))
        return self._rank.deltas(request.site, layer, x, slots, experts)

    def _advance(self) -> None:
        number = self._rank.advance(_CHUNKS)
        if number is not None:
            self._loading.pop(number).set_result(None)
        for failed, why in self._rank.take_failures():
            self._loading.pop(failed).set_exception(
                ValueError(f"The adapter could not be loaded: {why}")
            )

    def _run_commands(self) -> None:
        while True:
            try:
                command, done = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                if command():
                    done.set_result(None)
            except (ValueError, OSError) as error:
                done.set_exception(error)
            except BaseException:  # the loop ends, and this command stands in no queue any more
                done.set_exception(ConnectionError(_GONE))
                raise

    def _fail_commands(self) -> None:
        with contextlib.suppress(KeyError):  # none is left; any thread may have taken the last one
            while True:
                self._loading.popitem()[1].set_exception(ConnectionError(_GONE))
        while True:
            try:
                self._commands.get_nowait()[1].set_exception(ConnectionError(_GONE))
            except queue.Empty:
                return

    def _submit(
        self, command: Callable[[], bool], done: Future[None] | None = None
    ) -> Future[None]:
        """Queue a command for the loop, which may run it before this returns; return `done`.

        A command returns whether that was all there was to do: the loop then completes `done`, by
        default a new future, and else what the command has begun does.
        """
        done = Future() if done is None else done
        self._commands.put((command, done))
        if self._programs is not None:
            self._programs.interrupt()
        if self._stopped:
            self._fail_commands()
        return done

    def _part(
        self, folder: str, digest: str, keep: Callable[[AdapterWeights], object]
    ) -> tuple[AdapterWeights, float]:
        """Return this rank's part, and the seconds in which it was read; 0.0: the host had it.

        `keep` is told one that was read by this thread; a read that is under way is waited for.
        """
        part = self._parts.get(digest)
        if part is not None:
            return part, 0.0
        return self._reads.read(folder, digest, lambda: self._read_part(folder, digest, keep))

    def _read_part(
        self, folder: str, digest: str, keep: Callable[[AdapterWeights], object]
    ) -> tuple[AdapterWeights, float]:
        with self._read_room.hold(folder_bytes(folder)):
            begun = time.monotonic()
            weights = self._read(folder, digest)
            read_s = time.monotonic() - begun
            part = shard_part(weights, self._rank.shard, copy=not self._source.made_up)
            del weights  # whose bytes the room counts
            part = self._rank.pin(part)
            keep(part)
        return part, read_s

    def _read(self, folder: str, digest: str) -> AdapterWeights:
        try:
            weights = self._source.read_adapter(Path(folder), self._catalogue, limits=self._limits)
        except OSError as error:
            raise ValueError(
                f"The LoRA Server cannot read the adapter's folder: {error.strerror or error}."
            ) from error
        if not isinstance(weights, AdapterWeights):
            raise ValueError("The LoRA Server holds LoRA adapters; this one is of another kind.")
        if weights.digest != digest:
            raise ValueError(
                f"The files of the adapter have sha256 {weights.digest[:12]} here and "
                f"{digest[:12]} on the instance; load it anew."
            )
        return weights
