"""A host that follows rank 0 of an instance over several hosts: its process, kept there."""

import contextlib
import functools
import logging
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from serving.api.cluster_config import ClusterConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.engine.metrics import logs
from serving.runtime.about import about_of
from serving.runtime.child_process import AbstractChild, Pulse
from serving.runtime.gang import EXIT_LOST, Gang
from serving.runtime.gang_stream import GangPlace
from serving.runtime.gpu_assignment import use_gpu
from serving.runtime.keeper import Keeper, end_keepers
from serving.runtime.role_host import THIS_HOST, AbstractRoleHost

logger = logging.getLogger(__name__)

_START_S = 120.0  # to import what it needs, on a slow machine
_END_S = 5.0
_PING = b"there?"


def gang_of(options: Options, place: GangPlace | None = None) -> Gang | None:
    """Meet the other hosts' processes; None for an instance of one host.

    `place` is this process's, by default as the flags say. Raises StartError when they do not fit
    together.
    """
    cluster = options.cluster
    if cluster.nnodes == 1:
        return None
    try:
        return Gang(place or place_of(cluster), about_of(options.engine))
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot serve on {cluster.nnodes} nodes: {error}") from error


def place_of(cluster: ClusterConfig) -> GangPlace:
    """Return this node's place, as the flags say. Raises GangRefused, OSError for the secret."""
    secret = Path(cluster.nodes_secret_file or "").read_bytes().strip()
    address = (cluster.master_addr, cluster.master_port)
    return GangPlace(cluster.node_rank, cluster.nnodes, address, secret)


class NodeProcess(AbstractChild):
    """A process that follows rank 0; `stop` or the end of this process ends it."""

    def __init__(
        self,
        options: Options,
        place: GangPlace | None = None,
        host: AbstractRoleHost = THIS_HOST,
    ):
        """Start the process, on `host`; `place` is as of gang_of."""
        self._life, life = host.pipe()
        rank = options.cluster.node_rank if place is None else place.rank
        process = host.process(node_main, (life, options, place), f"node-{rank}")
        super().__init__(process, _END_S)
        life.close()

    def wait_up(self) -> None:
        """Return when the process answers, or has not for some time."""
        self.is_ready = self.pulse(_START_S) is Pulse.UP

    def pulse(self, limit_s: float) -> Pulse:
        """See AbstractChild: the answer of a thread of it."""
        with contextlib.suppress(OSError, EOFError):
            self._life.send_bytes(_PING)
            if self._life.poll(limit_s):
                while self._life.poll(0):  # earlier ones may have been answered late
                    self._life.recv_bytes()
                return Pulse.UP
        return Pulse.SILENT

    def hang_up(self) -> None:
        """Close the connection that keeps the process."""
        self._life.close()


def node_main(life: Connection, options: Options, place: GangPlace | None = None) -> None:
    """Follow rank 0 until it ends, or the other side of `life` has gone; status 1: cannot start."""
    rank = options.cluster.node_rank if place is None else place.rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.configure(options.log_level)
    threading.Thread(target=_answer, args=(life,), name="life", daemon=True).start()
    from serving.engine.parts.following import follow

    devices = options.engine.tensor_parallel_size // options.cluster.nnodes
    try:
        use_gpu(0, devices)
        gang = gang_of(options, place)
        assert gang is not None, "a node of an instance of one host"
        follow(options.engine, gang)
    except (StartError, ValueError, OSError, NotImplementedError) as error:
        logger.error("Node %d: %s", rank, error)
        os._exit(1)
    os._exit(0)


def _answer(life: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            life.send_bytes(life.recv_bytes())
    os._exit(EXIT_LOST)


class Node:
    """The process of this host, started anew when it has lost the others."""

    def __init__(self, options: Options):
        self._options = options
        self._closing = threading.Event()
        self._status: int | None = None
        self._process = NodeProcess(options)
        self._process.wait_up()
        self._keeper = Keeper(
            f"node {options.cluster.node_rank}",
            functools.partial(getattr, self, "_process"),
            self._replace,
            self._closing,
        )

    def wait(self) -> None:
        """Return when rank 0 has ended the instance, or `end` was called.

        Raises StartError when the process cannot start, as its log says.
        """
        self._closing.wait()
        end_keepers([self._keeper], lambda: [self._process])
        self._process.stop()
        if self._status:
            raise StartError(f"Node {self._options.cluster.node_rank} cannot serve; see its log.")

    def end(self) -> None:
        """Let `wait` return."""
        self._closing.set()

    def _replace(self, dead: AbstractChild) -> None:
        status = dead.exit_status
        dead.stop()
        if status in (0, 1):  # rank 0 has ended, or refused
            self._status = status
            self._closing.set()
            return
        logger.warning("The process of this node has ended; restarting it.")
        self._process = NodeProcess(self._options)
        self._process.wait_up()


def serve_node(options: Options) -> None:
    """Follow rank 0 until it ends the instance, or SIGTERM or SIGINT. Raises StartError."""
    logger.info("%s", logs.version_line())
    cluster = options.cluster
    where = cluster.node_rank, cluster.nnodes, cluster.master_addr, cluster.master_port
    logger.info("Node %d of %d follows rank 0 at %s:%d.", *where)
    node = Node(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.end())
    node.wait()
