"""Several LLM instances and their LoRA Server, on this host or others, under one supervisor."""

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from serving.cli.options import Options
from serving.cli.serve import journal_of
from serving.cluster.adapter_changes import AdapterChanges
from serving.cluster.addresses import Address, FarAddress
from serving.cluster.instance_process import BUDGETS, InstanceProcess
from serving.cluster.router import Router
from serving.cluster.server_place import ServerPlace
from serving.lora_server.calls import serve_leases
from serving.lora_server.group import ServerGroup
from serving.lora_server.spec import ServerSpec
from serving.runtime.child_process import AbstractChild
from serving.runtime.keeper import Keeper, end_keepers
from serving.runtime.role_host import AbstractRoleHosts, OneHost

logger = logging.getLogger(__name__)

_RESTART_S = 1.0  # after an instance that did not come back


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
        self._folder = Path(tempfile.mkdtemp(prefix="lora-jax-"))
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
        self.group: ServerGroup | None = None
        try:
            if spec is not None:
                first_gpu = cluster.instances * options.engine.tensor_parallel_size
                self.group = ServerGroup(spec, first_gpu, self._hosts, self._end_instances)
            for number in range(cluster.instances):
                self._processes.append(self._start(number))
            for process in self._processes:
                self._wait_ready(process)
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

    def replace_no_more(self) -> None:
        """The end has begun: an instance that leaves, perhaps of the same signal, is not missed."""
        self._closing.set()

    def close(self, end_s: float | None = None) -> None:
        """End all roles and remove what they left. A second call does nothing.

        Roles that have not left after `end_s` are killed.
        """
        share_s = None if end_s is None else end_s / 2  # instances leave first, then ranks
        self._closing.set()
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
        for folder in (self._options.http.budgets_folder, self._folder):
            shutil.rmtree(folder or "", ignore_errors=True)

    def _start(self, number: int) -> InstanceProcess:
        group, place = self.group, None
        if group is not None:
            place = ServerPlace(group.spec, group.places, self._cluster)
        options, last = self._options, number == self._cluster.instances - 1
        if options.engine.merge_adapter is not None:
            changes = {"lora_merge": "off"} if last else {"merge_adapter": None}
            options = dataclasses.replace(
                options, engine=dataclasses.replace(options.engine, **changes)
            )
        hosts = self._hosts.instance(number)
        return InstanceProcess(options, number, self._path(number), place, self._leases, hosts)

    def _path(self, number: int) -> str:
        return str(self._folder / f"instance-{number}")

    def _budgets_folder(self, options: Options) -> Path:
        """Return a new folder where instances share the tokens a minute of keys.

        It is below --state-dir where the instances are on other hosts, which must then see it, for
        this and for the journal. Raises ConnectionError for a host that does not.
        """
        budgets = self._folder / BUDGETS
        budgets.mkdir(mode=0o700)
        http = options.http
        limits = http.key_limits.tokens_per_minute is not None or http.keys_file is not None
        if self._hosts.are_this_host or not (limits or http.enable_runtime_lora):
            return budgets
        assert options.state_dir is not None, "a folder for what lasts as long as the server"
        self._hosts.require_folder(options.state_dir)
        budgets = Path(options.state_dir, f"{BUDGETS}-{os.getpid()}")
        budgets.mkdir(mode=0o700, exist_ok=True)
        return budgets

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
        logger.warning("Instance %d has ended; restarting it.", dead.number)
        self.router.set_up(dead.number, False)
        dead.stop()
        try:
            process = self._start(dead.number)
        except ConnectionError as error:
            logger.error("Instance %d has no host: %s", dead.number, error)
            self._closing.wait(_RESTART_S)
            return
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
