"""All ranks of a LoRA Server: started, watched, restarted when one dies."""

import contextlib
import functools
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable

from serving.lora_server.coordinator import Coordinator
from serving.lora_server.rank_process import RankProcess
from serving.lora_server.spec import ServerSpec
from serving.lora_server.transport.selection import TCP, RankPlace
from serving.lora_server.world_members import WorldMembers, rank_member
from serving.runtime.all_or_none import all_or_none
from serving.runtime.child_process import AbstractChild
from serving.runtime.keeper import Keeper, end_keepers
from serving.runtime.role_host import AbstractRoleHost, AbstractRoleHosts, OneHost
from serving.runtime.socket_folder import socket_folder

logger = logging.getLogger(__name__)

_RESTART_S = 1.0  # between two starts of the same rank


class ServerGroup:
    """A LoRA Server of `spec.ranks` processes with its coordinator."""

    def __init__(
        self,
        spec: ServerSpec,
        first_gpu: int = 0,
        hosts: AbstractRoleHosts | None = None,
        moved: Callable[[], None] = lambda: None,
        members: WorldMembers | None = None,
    ):
        """Start all ranks, on GPUs from `first_gpu` on, and wait until instances may connect.

        `moved` is called when a rank that was started anew has another address. Members of a world
        are started only: `listen` and `open` do the rest. Raises ConnectionError when one of them
        ends instead; its own log says why.
        """
        self.members = members
        self.spec, self._first_gpu, self._moved = spec, first_gpu, moved
        self._hosts = hosts or OneHost()
        self._folder = socket_folder("lora-server-")
        self._secret = secrets.token_bytes(32)
        self._addresses: dict[int, tuple[str, int]] = {}  # over TCP, once they are known
        self._no_host: dict[int, str] = {}  # why, as it was said, by rank
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the processes, against `close`
        self._processes = [self._start(rank) for rank in range(spec.ranks)]
        self.coordinator = Coordinator([p.control for p in self._processes], spec.num_adapters)
        self._keepers: list[Keeper] = []
        if members is not None:
            return
        try:
            self.listen()
            self.open()
        except BaseException:
            self._end()
            raise

    def listen(self) -> None:
        """Return when all ranks are ready, and have addresses where instances find them.

        Raises ConnectionError when one ends instead.
        """
        self._on_all(self._make_ready)

    def open(self) -> None:
        """Return when instances may connect; members of a world wait until all have joined it.

        Raises ConnectionError when a rank ends instead.
        """
        self._on_all(self._open)
        self._keepers = [
            Keeper(f"rank {rank}", functools.partial(self._rank, rank), self._rescue, self._closing)
            for rank in range(self.spec.ranks)
        ]

    @property
    def places(self) -> tuple[RankPlace, ...]:
        """Current addresses of the ranks."""
        return tuple(process.place for process in self.processes)

    @property
    def processes(self) -> list[RankProcess]:
        """The ranks' processes as they are now."""
        with self._lock:
            return list(self._processes)

    def close(self, end_s: float | None = None) -> None:
        """End all ranks and remove what they left; one that has not left by then is killed."""
        self._closing.set()
        end_keepers(self._keepers, lambda: self.processes)
        self._end(end_s)

    def up(self) -> list[bool]:
        """Return which ranks answer."""
        return [keeper.is_up for keeper in self._keepers]

    def kill(self) -> None:
        """End all ranks at once; `close` must still be called."""
        for process in self.processes:
            with contextlib.suppress(ValueError):  # it has been stopped
                process.kill()

    def _on_all(self, call: Callable[[RankProcess], None]) -> None:
        calls = [functools.partial(call, process) for process in self.processes]
        all_or_none(calls, self.kill)

    def _start(self, rank: int) -> RankProcess:
        """Return a new process of the rank, a member of the next world if there are worlds."""
        members, name = self.members, rank_member(rank)
        number = 0 if members is None else members.enter(name)
        try:
            host = self._hosts.server_rank(rank)
            place = self._place(rank, host)
            process = RankProcess(self.spec, rank, place, self._first_gpu + rank, host)
        except ConnectionError:
            if members is not None:
                members.leave(number, name)
            raise
        process.world = number
        if members is not None:
            members.place(number, name, host.address)
            members.hold(number, process)
        return process

    def _place(self, rank: int, host: AbstractRoleHost) -> RankPlace:
        """Return where a new process of the rank is to listen: where the last one did."""
        if host.address is None and self.spec.transport != TCP:
            return RankPlace(str(self._folder / f"rank-{rank}"))
        address, port = self._addresses.get(rank, ("", 0))
        name = host.address or "127.0.0.1"
        return RankPlace((name, port if name == address else 0), self._secret)

    def _make_ready(self, process: RankProcess) -> None:
        """Return when the rank has compiled, and listens if it will be in a world."""
        process.wait_ready()
        if (members := self.members) is None:
            return
        number, name = process.world, b""
        if process.rank == 0:
            name = process.new_world(one_host=members.is_one_host(number))
        process.listen()
        self._keep_address(process)
        members.report_listening(number, name)

    def _open(self, process: RankProcess) -> None:
        """Let instances in; the rank is ready."""
        if self.members is None:
            process.open()
            self._keep_address(process)
        else:
            process.join(self.members.world(process.world))

    def _keep_address(self, process: RankProcess) -> None:
        if isinstance(process.place.address, tuple):
            self._addresses[process.rank] = process.place.address

    def _end(self, end_s: float | None = None) -> None:
        stops = [threading.Thread(target=p.stop, args=(end_s,)) for p in self.processes]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        self.coordinator.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _rank(self, rank: int) -> RankProcess:
        with self._lock:
            return self._processes[rank]

    def _rescue(self, dead: AbstractChild) -> None:
        assert isinstance(dead, RankProcess)
        self._replace(dead)

    def _replace(self, dead: RankProcess) -> None:
        rank, begun = dead.rank, time.monotonic()
        before = self._addresses.get(rank)
        if (why := self._no_host.get(rank)) is None:
            how = dead.end_by_signal()
            logger.warning("Rank %d of the LoRA Server has ended%s; restarting it.", rank, how)
        self.coordinator.lose(rank)
        dead.stop()
        try:
            process = self._start(rank)
        except ConnectionError as error:
            if str(error) != why:  # a node may be away for long
                logger.error("Rank %d of the LoRA Server has no host: %s", rank, error)
            self._no_host[rank] = str(error)
            self._closing.wait(_RESTART_S)
            return
        self._no_host.pop(rank, None)
        with self._lock:
            self._processes[rank] = process
        if self._closing.is_set():
            process.kill()
        try:
            self._make_ready(process)
            self.coordinator.restore(rank, process.control)
            self._open(process)
        except (ConnectionError, ValueError, RuntimeError) as error:
            logger.error("Rank %d of the LoRA Server could not be restarted: %s", rank, error)
            process.kill()
            self._closing.wait(_RESTART_S)
            return
        if self.members is None and self._addresses.get(rank) != before:
            logger.warning("Rank %d has another address; restarting the instances.", rank)
            self._moved()
        logger.info("Rank %d was restarted in %.1f s.", rank, time.monotonic() - begun)
