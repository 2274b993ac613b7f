"""Process of one rank of a LoRA Server, and its parent's handle of it."""

import contextlib
import dataclasses
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp

from lora_jax.adapters.reader import AdapterReadLimits
from serving.lora_server.calls import Caller, RemoteRank, answer_calls
from serving.lora_server.parallel_calls import ParallelCaller, answer_in_parallel
from serving.lora_server.rank import ServerRank
from serving.lora_server.server import RankServer
from serving.lora_server.spec import ServerDesign, ServerSpec, design
from serving.lora_server.transport import world_library
from serving.lora_server.transport.selection import NVSHMEM, Door, RankPlace
from serving.lora_server.transport.world import World
from serving.runtime.child_process import AbstractChild, Pulse
from serving.runtime.device_copier import device_copier
from serving.runtime.gpu_assignment import use_gpu
from serving.runtime.program_cache import keep_programs
from serving.runtime.pulses import Echo, Pulses, Starting, wait_alive
from serving.runtime.role_host import THIS_HOST, AbstractRoleHost

logger = logging.getLogger(__name__)

_START_S = 300.0  # to import jax and compile, on a slow machine
_END_S = 10.0
_WORLD_S = 900.0  # for all members of a world to load their models and to join


class RankProcess(AbstractChild):
    """A running rank; `stop` or the end of this process ends it."""

    def __init__(
        self,
        spec: ServerSpec,
        rank: int,
        place: RankPlace,
        gpu: int = 0,
        host: AbstractRoleHost = THIS_HOST,
    ):
        """Start the process on `host`, on this GPU of it if there are any.

        `wait_ready` returns when it can take adapters. Raises ConnectionError when the host is not
        there.
        """
        ours, theirs = host.pipe()
        asking, pulse = host.pipe()
        fetching, fetched = host.pipe()
        self._pulses = Pulses(asking)
        self.place = place
        self.world = 0  # for which it was started: its number among WorldMembers
        pipes = theirs, pulse, fetched
        args = *pipes, spec, rank, place, 0 if host.has_own_gpus else gpu
        super().__init__(host.process(rank_main, args, f"lora-server-{rank}"), _END_S)
        for pipe in pipes:
            pipe.close()
        self.rank = rank
        self._caller, self._fetches = Caller(ours, _START_S), ParallelCaller(fetching)
        self.control = RemoteRank(self._caller, self._fetches)

    def wait_ready(self) -> None:
        """Return when the rank has compiled. Raises ConnectionError if it ended instead."""
        self._begin("ready")
        self.is_ready = True

    def open(self) -> None:
        """Let instances connect to the rank at `place`. Raises ConnectionError if it cannot."""
        self._listens_at(self._begin("open"))

    def listen(self) -> None:
        """Let the rank listen at `place` before it joins a world. Raises ConnectionError."""
        self._listens_at(self._begin("listen"))

    def new_world(self, *, one_host: bool) -> bytes:
        """Return the id of a new world, whose PE 0 the rank will be. Raises ConnectionError."""
        return bytes.fromhex(self._begin("new_world", one_host))

    def join(self, world: World) -> None:
        """Let the rank join a world, then let instances connect; returns when all have joined.

        Raises ConnectionError when that fails.
        """
        said = world.id.hex(), world.ranks, world.instances, world.one_host
        self.is_ready = False  # who closes meanwhile does not wait for the other members
        self._begin("join", *said, limit_s=_WORLD_S)
        self.is_ready = True

    def _listens_at(self, port: int) -> None:
        if isinstance(self.place.address, tuple):
            self.place = dataclasses.replace(self.place, address=(self.place.address[0], port))

    def _begin(self, call: str, *arguments: Any, limit_s: float | None = None) -> Any:
        name = f"Rank {self.rank} of the LoRA Server"
        wait = functools.partial(wait_alive, [Starting(self, name, self._pulses)])
        try:
            return self._caller.call(call, *arguments, limit_s=limit_s, wait=wait)
        except ConnectionError:
            raise ConnectionError(f"{name} did not start; its log says why.") from None

    def stats(self) -> dict[str, int]:
        """Return the fields of server.RankStats."""
        return self._caller.call("stats")

    def pulse(self, limit_s: float) -> Pulse:
        """See AbstractChild; a load under way does not delay the answer."""
        return Pulse.UP if self._pulses.answered(limit_s) else Pulse.SILENT

    def hang_up(self) -> None:
        """Close the connection that keeps the process."""
        self._caller.close()
        self._fetches.close()
        self._pulses.close()


def rank_main(
    connection: Connection,
    pulse: Connection,
    fetches: Connection,
    spec: ServerSpec,
    rank: int,
    place: RankPlace,
    gpu: int,
) -> None:
    """Be rank `rank` until the connection's other side has gone; status 1: it cannot start."""
    for sent_to_all in (signal.SIGINT, signal.SIGTERM):  # whoever started us closes the connection
        signal.signal(sent_to_all, signal.SIG_IGN)
    echo = Echo(pulse, functools.partial(_leave, place))
    try:
        use_gpu(gpu)
        keep_programs()
        if spec.transport == NVSHMEM:
            world_library.library()
        door = Door(design(spec).terms, rank, spec.transport, place)
        server = _make_server(spec, rank, door)
    except (ValueError, NotImplementedError, OSError) as error:  # what the user can change
        logger.error("Rank %d of the LoRA Server cannot start: %s", rank, error)
        raise SystemExit(1) from None
    loop = threading.Thread(target=_run, args=(server,), name="lora-server-loop", daemon=True)
    loop.start()
    functions = {
        "ready": lambda: None,
        "load": server.load,
        "unload": server.unload,
        "open": lambda: server.open() or door.port,
        "listen": lambda: door.listen() or door.port,
        "new_world": _said_if_not(rank, lambda on_one: world_library.new_id(one_host=on_one).hex()),
        "join": _said_if_not(rank, functools.partial(_join, server, door, echo)),
        "stats": lambda: dataclasses.asdict(server.stats()),
    }
    beside = {"fetch": server.fetch, "forget": server.forget}
    answer_in_parallel(fetches, beside)
    answer_calls(connection, functions)
    server.stop()
    loop.join()
    _leave(place)


def _leave(place: RankPlace) -> None:
    """Remove the rank's Unix socket, and the folder with the last one."""
    if isinstance(place.address, str):
        with contextlib.suppress(OSError):
            os.unlink(place.address)
        with contextlib.suppress(OSError):  # others are still in it, or it has gone
            os.rmdir(os.path.dirname(place.address))


def _join(server: RankServer, door: Door, echo: Echo, *said: Any) -> None:
    """Join the world that `RankProcess.join` has told of; then instances may connect.

    The world waits for its last member, perhaps for ever: the process ends with its supervisor.
    """
    name, ranks, instances, one_host = said
    door.world = World(bytes.fromhex(name), ranks, instances, one_host)
    with echo.ending_the_process():
        server.open()


def _said_if_not(rank: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call, whose error this process logs: its parent only says that there was one."""

    def run(*arguments: Any) -> Any:
        try:
            return call(*arguments)
        except (ConnectionError, NotImplementedError) as error:
            logger.error("Rank %d of the LoRA Server cannot start: %s", rank, error)
            raise ConnectionError(str(error)) from error

    return run


def _run(server: RankServer) -> None:
    """Serve; a loop that breaks takes the process with it, so that nobody waits for it."""
    try:
        server.run()
    except NotImplementedError as error:  # a transport that is not here
        logger.error("Rank %d of the LoRA Server cannot start: %s", server.rank, error)
        os._exit(1)
    except BaseException:
        logger.exception("Rank %d of the LoRA Server has failed.", server.rank)
        os._exit(1)


def _require_memory(server_design: ServerDesign, rank: int) -> None:
    """Raise ValueError where the rank's adapters do not fit its device, as far as that is known."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    need = server_design.slot_bytes(rank)
    if limit is not None and need > limit:
        spec, name = server_design.spec, server_design.layout.placement.name
        raise ValueError(
            f"{spec.num_adapters} adapters of rank {spec.max_rank} take {need:,} bytes of a device "
            f"of {name}, which has {limit:,}; hold fewer (--lora-server-adapters), give them less "
            "(--lora-server-memory-bytes), or use more ranks."
        )


def _make_server(spec: ServerSpec, rank: int, door: Door) -> RankServer:
    """Return the rank's server, compiled."""
    server_design = design(spec)
    _require_memory(server_design, rank)
    held = ServerRank(
        server_design.catalogue,
        server_design.layout.shard(rank),
        server_design.sizes,
        jnp.dtype(spec.dtype),
        implementation=spec.implementation,
        copier=device_copier(),
    )
    held.warm_up()
    return RankServer(
        held,
        server_design.layout.moe_layers,
        server_design.catalogue,
        door.open,
        AdapterReadLimits(max_rank=spec.max_rank),
        spec.host_bytes,
        load_format=spec.load_format,
    )
