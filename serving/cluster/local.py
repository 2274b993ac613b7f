"""Several LLM instances and their LoRA Server, on this host or others, under one supervisor."""

import contextlib
import dataclasses
import functools
import logging
import shutil
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from serving.adapters.given_files import check_same
from serving.api.cluster_config import ClusterConfig
from serving.cli.model_flags import engines_of
from serving.cli.options import Options
from serving.cli.serve import journal_of
from serving.cluster.adapter_changes import AdapterChanges
from serving.cluster.addresses import Address, FarAddress
from serving.cluster.budgets_folder import BudgetsFolder
from serving.cluster.instance_process import BUDGETS, InstanceProcess
from serving.cluster.router import Router
from serving.cluster.server_place import ServerPlace
from serving.lora_server.calls import serve_leases
from serving.lora_server.group import ServerGroup
from serving.lora_server.spec import ServerSpec
from serving.lora_server.transport.selection import NVSHMEM
from serving.lora_server.world_members import WorldMembers, instance_member
from serving.runtime.all_or_none import all_or_none
from serving.runtime.child_process import AbstractChild
from serving.runtime.keeper import Keeper, end_keepers
from serving.runtime.role_host import AbstractRoleHost, AbstractRoleHosts, OneHost
from serving.runtime.socket_folder import socket_folder

logger = logging.getLogger(__name__)

_RESTART_S = 1.0  # after an instance that did not come back


@dataclasses.dataclass(frozen=True)
class _Seat:
    """The hosts of an instance's next process, and its world's number among WorldMembers."""

    number: int
    hosts: tuple[AbstractRoleHost, ...]
    world: int


def _members(spec: ServerSpec | None, cluster: ClusterConfig) -> WorldMembers | None:
    """Return the members of worlds if the rows travel within one."""
    if spec is None or spec.transport != NVSHMEM:
        return None
    return WorldMembers(spec.ranks, cluster.instances)


class LocalCluster:
    """All role processes: started together, started anew when one dies, ended by `close`.

    Its supervisor, front, journal and coordinator are here, whatever the hosts of the processes.
    """

    def __init__(
        self, options: Options, spec: ServerSpec | None, hosts: AbstractRoleHosts | None = None
    ):
        """Return when every instance answers. The processes are on `hosts`, by default this one.

        Raises ConnectionError when a role cannot start; its own log says why.
        """
        cluster = options.cluster
        self._cluster, self._hosts = cluster, hosts or OneHost()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the processes, against `close`
        self._processes: list[InstanceProcess] = []
        self._keepers: list[Keeper] = []
        self._no_host: dict[int, str] = {}  # why, as it was said, by instance
        self._shared: BudgetsFolder | None = None  # with instances of other hosts
        self.group: ServerGroup | None = None
        self._members = _members(spec, cluster)
        self._folder = socket_folder("lora-jax-")
        try:
            self._prepare(options)
            self._start_all(spec)
        except BaseException:
            self.close()
            raise
        self._keepers = [
            Keeper(
                f"instance {number}",
                functools.partial(self._instance, number),
                self._rescue,
                self._closing,
                functools.partial(self.router.set_up, number),
            )
            for number in range(cluster.instances)
        ]

    def _prepare(self, options: Options) -> None:
        """Set what the roles share: options, journal, addresses and router."""
        cluster = self._cluster
        if options.state_dir is None:  # instances are started anew; their server is not
            folder = str(self._folder)
            options = dataclasses.replace(options, state_dir=folder, state_lasts=False)
        budgets = self._budgets_folder(options)
        http = dataclasses.replace(options.http, budgets_folder=str(budgets))
        self._options = options = dataclasses.replace(options, http=http)
        self.changes = AdapterChanges(journal_of(options), lambda: self.processes)
        self.paths: list[Address] = [self._path(n) for n in range(cluster.instances)]
        names, merged = (module.name for module in options.adapters), options.engine.merge_adapter
        self.router = Router(cluster.instances, names, merged=merged)

    def _start_all(self, spec: ServerSpec | None) -> None:
        """Return when all roles answer. Raises ConnectionError, with processes left to `close`."""
        cluster, members = self._cluster, self._members
        if spec is not None:
            first_gpu = cluster.instances * self._options.engine.tensor_parallel_size
            self.group = ServerGroup(spec, first_gpu, self._hosts, self._end_instances, members)
        seats = [self._enter(number) for number in range(cluster.instances)]
        if self.group is not None and members is not None:
            self.group.listen()
        for seat in seats:
            self._processes.append(self._start(seat))
        calls: list[Callable[[], object]] = [
            functools.partial(self._wait_ready, process) for process in self._processes
        ]
        if self.group is not None and members is not None:
            calls.append(self.group.open)
        all_or_none(calls, self._kill_all)
        self._hold_files([process.digests for process in self._processes])

    def _hold_files(self, read: list[dict[str, str]]) -> None:
        """Let instances that are started anew serve the files that these have read, or none."""
        check_same(read)
        digests = {name: digest for one in read for name, digest in one.items()}
        held = [
            dataclasses.replace(a, digest=digests.get(a.name, "")) for a in self._options.adapters
        ]
        self._options = dataclasses.replace(self._options, adapters=tuple(held))

    @property
    def processes(self) -> list[InstanceProcess]:
        """The instances' processes as they are now."""
        with self._lock:
            return list(self._processes)

    @property
    def body_bytes(self) -> int:
        """The largest body that the instances take."""
        return max(process.body_bytes for process in self.processes)

    def roles(self) -> dict[str, list[bool]]:
        """Return which roles are up, by kind and number."""
        up = self.router.up
        roles = {"instances": [n in up for n in range(len(self.paths))]}
        if self.group is not None:
            roles["ranks"] = self.group.up()
        return roles

    def metrics_text(self) -> str:
        """Return the metrics of the LoRA Server, where there is one."""
        return "" if self.group is None else self.group.coordinator.metrics.text()

    def replace_no_more(self) -> None:
        """The end has begun: an instance that leaves, perhaps of the same signal, is not missed."""
        self._closing.set()

    def close(self, end_s: float | None = None) -> None:
        """End all roles and remove what they left. A second call does nothing.

        Roles that have not left after `end_s` are killed.
        """
        share_s = None if end_s is None else end_s / 2  # instances leave first, then ranks
        self._closing.set()
        if self._members is not None:
            self._members.close()
        end_keepers(self._keepers, lambda: self.processes)
        stops = [
            threading.Thread(target=process.stop, args=(share_s,)) for process in self.processes
        ]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        if self.group is not None:
            self.group.close(share_s)
        self._hosts.close()
        if self._shared is not None:
            self._shared.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _enter(self, number: int) -> "_Seat":
        """Return what a new process of the instance starts with, before it does.

        Raises ConnectionError when there is no host for it.
        """
        members, name = self._members, instance_member(number)
        world = 0 if members is None else members.enter(name)
        try:
            hosts = self._hosts.instance(number)
        except ConnectionError:
            if members is not None:
                members.leave(world, name)
            raise
        if members is not None:
            members.place(world, name, hosts[0].address)
        return _Seat(number, hosts, world)

    def _start(self, seat: "_Seat") -> InstanceProcess:
        """Return a new process; a member of a world starts when all ranks listen.

        Raises ConnectionError when its world has ended by then.
        """
        group, place, number, members = self.group, None, seat.number, self._members
        if group is not None:
            world = None if members is None else members.world(seat.world)
            place = ServerPlace(group.spec, group.places, self._cluster, world, number)
        last, other = engines_of(self._options.engine)
        engine = last if number == self._cluster.instances - 1 else other
        options = dataclasses.replace(self._options, engine=engine)
        path, hosts = self._path(number), seat.hosts
        process = InstanceProcess(options, number, path, place, self._leases, hosts)
        if members is not None:
            members.hold(seat.world, process)
        return process

    def _path(self, number: int) -> str:
        return str(self._folder / f"instance-{number}")

    def _budgets_folder(self, options: Options) -> Path:
        """Return a new folder where instances share the tokens a minute of keys.

        It is below --state-dir where instances answer on other hosts, which must then see it, for
        this and for the journal. Raises ConnectionError for a host that does not, and for a folder
        that this host cannot have.
        """
        budgets = self._folder / BUDGETS
        budgets.mkdir(mode=0o700)
        http = options.http
        limits = http.key_limits.tokens_per_minute is not None or http.keys_file is not None
        if self._hosts.answer_here or not (limits or http.enable_runtime_lora):
            return budgets
        assert options.state_dir is not None, "a folder for what lasts as long as the server"
        try:
            Path(options.state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._hosts.require_folder(options.state_dir)
            self._shared = BudgetsFolder(options.state_dir)
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(
                f"Cannot use --state-dir {options.state_dir}: {error.strerror}."
            ) from error
        return self._shared.path

    def _wait_ready(self, process: InstanceProcess) -> None:
        """Return when the instance answers, at an address that is new on another host."""
        process.wait_ready()
        if isinstance(process.path, FarAddress):
            self.paths[process.number] = process.path

    def _end_instances(self) -> None:
        """Let all instances start anew, for what they were told is true no more."""
        for process in self.processes:
            with contextlib.suppress(ValueError):
                process.kill()

    def _kill_all(self) -> None:
        """End all roles at once; `close` must still be called."""
        self._end_instances()
        if self.group is not None:
            self.group.kill()

    def _leases(self, instance: str, connection: Connection) -> None:
        assert self.group is not None, "leases without a server"
        serve_leases(self.group.coordinator, instance, connection)

    def _instance(self, number: int) -> InstanceProcess:
        with self._lock:
            return self._processes[number]

    def _rescue(self, dead: AbstractChild) -> None:
        assert isinstance(dead, InstanceProcess)
        self._replace(dead)

    def _replace(self, dead: InstanceProcess) -> None:
        why = self._no_host.get(dead.number)
        if why is None:
            how = dead.end_by_signal()
            logger.warning("Instance %d has ended%s; restarting it.", dead.number, how)
        self.router.set_up(dead.number, False)
        dead.stop()
        try:
            process = self._start(self._enter(dead.number))
        except ConnectionError as error:
            if str(error) != why:  # a node may be away for long
                logger.error("Instance %d cannot start now: %s", dead.number, error)
            self._no_host[dead.number] = str(error)
            self._closing.wait(_RESTART_S)
            return
        self._no_host.pop(dead.number, None)
        with self._lock:
            self._processes[dead.number] = process
        if self._closing.is_set():
            process.kill()
        try:
            self._wait_ready(process)
            with self.changes.lock:  # none passes between the journal's repetition and the news
                self.changes.repeat(process)
                self.router.set_up(dead.number, True)
        except ConnectionError as error:
            logger.error("%s", error)
            with contextlib.suppress(ValueError):
                process.kill()
            self._closing.wait(_RESTART_S)
