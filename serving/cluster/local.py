"""Several LLM instances and their LoRA Server on this host, under one supervisor."""

import contextlib
import logging
import multiprocessing.connection
import shutil
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from serving.cluster.instance_process import InstanceProcess
from serving.cluster.router import Router
from serving.cluster.server_place import ServerPlace
from serving.lora_server.calls import serve_leases
from serving.lora_server.group import ServerGroup
from serving.lora_server.spec import ServerSpec
from serving.options import Options

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # the watch looks at least so often whether it is to end
_RESTART_S = 1.0  # after an instance that did not come back


class LocalCluster:
    """All role processes: started together, started anew when one dies, ended by `close`."""

    def __init__(self, options: Options, spec: ServerSpec | None):
        """Return when every instance answers.

        Raises ConnectionError when a role cannot start; its own log says why.
        """
        cluster = options.cluster
        self._options, self._cluster = options, cluster
        self._closing = threading.Event()
        self._lock = threading.Lock()  # the processes, against `close`
        self._processes: list[InstanceProcess] = []
        self._watch: threading.Thread | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="lora-jax-"))
        self.paths = [str(self._folder / f"instance-{n}") for n in range(cluster.instances)]
        self.router = Router(cluster.instances, (module.name for module in options.adapters))
        self.group: ServerGroup | None = None
        try:
            self.group = None if spec is None else ServerGroup(spec, cluster.instances)
            self._processes = [self._start(number) for number in range(cluster.instances)]
            for process in self._processes:
                process.wait_ready()
        except BaseException:
            self.close()
            raise
        self._watch = threading.Thread(target=self._run, name="instances-watch", daemon=True)
        self._watch.start()

    @property
    def processes(self) -> list[InstanceProcess]:
        """The instances' processes as they are now."""
        with self._lock:
            return list(self._processes)

    def close(self) -> None:
        """End all roles and remove what they left. A second call does nothing."""
        self._closing.set()
        if self._watch is not None:
            for process in self.processes:
                if not process.is_ready:  # the watch waits for it
                    process.kill()
            self._watch.join()
        stops = [threading.Thread(target=process.stop) for process in self.processes]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        if self.group is not None:
            self.group.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, number: int) -> InstanceProcess:
        group, place = self.group, None
        if group is not None:
            place = ServerPlace(group.spec, tuple(group.paths), self._cluster)
        return InstanceProcess(self._options, number, self.paths[number], place, self._leases)

    def _leases(self, instance: str, connection: Connection) -> None:
        assert self.group is not None, "leases without a server"
        serve_leases(self.group.coordinator, instance, connection)

    def _run(self) -> None:
        """Wait for an instance to end, and put a new process in its place."""
        while not self._closing.is_set():
            sentinels = {process.sentinel: process for process in self.processes}
            for process in sentinels.values():
                self.router.set_up(process.number, process.is_ready)
            for ended in multiprocessing.connection.wait(list(sentinels), _LOOK_S):
                if not self._closing.is_set() and isinstance(ended, int):
                    self._replace(sentinels[ended])

    def _replace(self, dead: InstanceProcess) -> None:
        logger.warning("Instance %d has ended; starting it anew.", dead.number)
        self.router.set_up(dead.number, False)
        dead.stop()
        process = self._start(dead.number)
        with self._lock:
            self._processes[dead.number] = process
        try:
            process.wait_ready()
        except ConnectionError as error:
            logger.error("%s", error)
            with contextlib.suppress(ValueError):
                process.kill()
            self._closing.wait(_RESTART_S)
            return
        self.router.set_up(dead.number, True)
