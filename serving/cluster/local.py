"""Several LLM instances and their LoRA Server on this host, under one supervisor."""

import contextlib
import dataclasses
import functools
import logging
import shutil
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from serving.cli.options import Options
from serving.cli.serve import journal_of
from serving.cluster.adapter_changes import AdapterChanges
from serving.cluster.instance_process import BUDGETS, InstanceProcess
from serving.cluster.router import Router
from serving.cluster.server_place import ServerPlace
from serving.lora_server.calls import serve_leases
from serving.lora_server.group import ServerGroup
from serving.lora_server.spec import ServerSpec
from serving.runtime.child_process import AbstractChild
from serving.runtime.keeper import Keeper, end_keepers

logger = logging.getLogger(__name__)

_RESTART_S = 1.0  # after an instance that did not come back


class LocalCluster:
    """All role processes: started together, started anew when one dies, ended by `close`."""

    def __init__(self, options: Options, spec: ServerSpec | None):
        """Return when every instance answers.

        Raises ConnectionError when a role cannot start; its own log says why.
        """
        cluster = options.cluster
        self._cluster = cluster
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the processes, against `close`
        self._processes: list[InstanceProcess] = []
        self._keepers: list[Keeper] = []
        self._folder = Path(tempfile.mkdtemp(prefix="lora-jax-"))
        if options.state_dir is None:  # instances are started anew; their server is not
            folder = str(self._folder)
            options = dataclasses.replace(options, state_dir=folder, state_lasts=False)
        budgets = self._folder / BUDGETS
        budgets.mkdir(mode=0o700)
        http = dataclasses.replace(options.http, budgets_folder=str(budgets))
        self._options = options = dataclasses.replace(options, http=http)
        self.changes = AdapterChanges(journal_of(options), lambda: self.processes)
        self.paths = [str(self._folder / f"instance-{n}") for n in range(cluster.instances)]
        names, merged = (module.name for module in options.adapters), options.engine.merge_adapter
        self.router = Router(cluster.instances, names, merged=merged)
        self.group: ServerGroup | None = None
        try:
            first_gpu = cluster.instances * options.engine.tensor_parallel_size
            self.group = None if spec is None else ServerGroup(spec, first_gpu)
            self._processes = [self._start(number) for number in range(cluster.instances)]
            for process in self._processes:
                process.wait_ready()
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
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, number: int) -> InstanceProcess:
        group, place = self.group, None
        if group is not None:
            place = ServerPlace(group.spec, tuple(group.paths), self._cluster)
        options, last = self._options, number == self._cluster.instances - 1
        if options.engine.merge_adapter is not None:
            own = {"lora_merge": "off"} if last else {"merge_adapter": None}
            options = dataclasses.replace(
                options, engine=dataclasses.replace(options.engine, **own)
            )
        return InstanceProcess(options, number, self.paths[number], place, self._leases)

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
        logger.warning("Instance %d has ended; starting it anew.", dead.number)
        self.router.set_up(dead.number, False)
        dead.stop()
        process = self._start(dead.number)
        with self._lock:
            self._processes[dead.number] = process
        if self._closing.is_set():
            process.kill()
        try:
            process.wait_ready()
            with self.changes.lock:  # none passes between the journal's repetition and the news
                self.changes.repeat(process)
                self.router.set_up(dead.number, True)
        except ConnectionError as error:
            logger.error("%s", error)
            with contextlib.suppress(ValueError):
                process.kill()
            self._closing.wait(_RESTART_S)
