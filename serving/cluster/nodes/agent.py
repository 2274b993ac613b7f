"""A node's agent: starts the roles of this host that rank 0 asks for, and ends them with it."""

import contextlib
import logging
import os
import signal
import stat
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from serving.api.cluster_config import ClusterConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster.far.actor import RoleActor
from serving.cluster.nodes.link import SILENT_S, AbstractNode
from serving.engine.metrics import logs
from serving.runtime.about import about_of, environment_of
from serving.runtime.gang_stream import (
    BEAT_S,
    Connection,
    GangPlace,
    GangRefused,
    join_leader,
)
from serving.runtime.leaving import leave
from serving.runtime.visible_gpus import VISIBLE, first_of

logger = logging.getLogger(__name__)

_OF_OTHERS = 0o027  # rights; a group may read, as pods do
_END_S = 5.0  # of a killed process, which may wait for a driver


class Starts:
    """The starts of roles on this host, by number; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actors: dict[int, RoleActor] = {}
        self._has_ended = False

    def call(self, start: int, method: str, arguments: Sequence[Any]) -> Any:
        """Return what RoleActor's method of this name returns, for one start.

        `run` is given the call's bytes and a part of the GPUs: its first one and their number.
        Raises ConnectionError after `end`, and what the method raises.
        """
        with self._lock:
            if self._has_ended:
                raise ConnectionError("this node's agent ends")
            actor = self._actors.setdefault(start, RoleActor())
        if method == "run":
            payload, gpus = arguments
            return actor.run(payload, {VISIBLE: first_of(os.environ.get(VISIBLE), *gpus)})
        if method == "kill":
            self._kill(start, actor)
            return None
        methods = {
            "free_port": actor.free_port,
            "sees": actor.sees,
            "is_at_work": actor.is_at_work,
        }
        return methods[method](*arguments)

    def _kill(self, start: int, actor: RoleActor) -> None:
        """Kill a start's process; nothing comes for one that has ended, which is forgotten."""
        actor.kill()
        if actor.has_ended:
            with self._lock:
                self._actors.pop(start, None)

    def end(self) -> None:
        """Kill all processes and wait for their ends; none is started any more."""
        with self._lock:
            self._has_ended = True
            actors = list(self._actors.values())
        for actor in actors:
            actor.kill()
        for actor in actors:
            actor.join(_END_S)


class OwnNode(AbstractNode):
    """The node of rank 0."""

    def __init__(self, address: str):
        self.address, self._starts = address, Starts()

    def call(self, start: int, method: str, *arguments: Any) -> Future[Any]:
        """See AbstractNode."""
        future: Future[Any] = Future()

        def run() -> None:
            why, result = _answer(self._starts, start, method, arguments)
            if why is None:
                future.set_result(result)
            else:
                future.set_exception(ConnectionError(why))

        threading.Thread(target=run, name=f"{method} {start}", daemon=True).start()
        return future

    def close(self) -> None:
        """See AbstractNode."""
        self._starts.end()


def _answer(
    starts: Starts, start: int, method: str, arguments: Sequence[Any]
) -> tuple[str | None, Any]:
    """Return why a call failed, or None and its result."""
    try:
        return None, starts.call(start, method, arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def answer_calls(connection: Connection, starts: Starts) -> str | None:
    """Answer calls of rank 0; return None when it ends this node, else why it is lost.

    Owns both: what was started has ended then.
    """
    sending, ended = threading.Lock(), threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(BEAT_S):
                with sending:
                    connection.beat(serving=True)

    def answer(number: int, start: int, method: str, arguments: Sequence[Any]) -> None:
        said = number, *_answer(starts, start, method, arguments)
        with contextlib.suppress(OSError), sending:
            connection.send(said)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    try:
        while True:
            is_beat, value = connection.receive(SILENT_S)
            if is_beat:
                continue
            if value is None:
                return None
            threading.Thread(target=answer, args=value, name=value[2], daemon=True).start()
    except OSError as error:
        return str(error)
    finally:
        ended.set()
        connection.close()
        starts.end()


def place_of(cluster: ClusterConfig) -> GangPlace:
    """Return this node's place, as the flags say. Raises GangRefused, OSError for the secret."""
    path = Path(cluster.nodes_secret_file or "")
    secret, mode = path.read_bytes().strip(), stat.S_IMODE(path.stat().st_mode)
    if mode & _OF_OTHERS:
        logger.warning(
            "Others on this host may read or change --nodes-secret-file %s (mode %o): whoever "
            "knows the secret runs code on all nodes. chmod 600 %s",
            *(path, mode, path),
        )
    address = (cluster.master_addr, cluster.master_port)
    return GangPlace(cluster.node_rank, cluster.nnodes, address, secret)


def about_roles(options: Options) -> Mapping[str, Any]:
    """Return what must be equal on all nodes; see serving.runtime.about."""
    cluster = options.cluster
    # Rank 0 tells the processes of all nodes where the model is.
    more = {"the model's path": options.engine.model}
    for name in ("nnodes", "instances", "lora_server"):
        more[f"--{name.replace('_', '-')}"] = str(getattr(cluster, name))
    return about_of(options.engine) | environment_of() | more


def serve_agent(options: Options) -> None:
    """Start the roles that rank 0 asks for until it ends, or SIGTERM or SIGINT.

    A rank 0 that is lost may come back within ten minutes. Raises StartError where it does not, and
    where the nodes do not fit together.
    """
    logger.info("%s", logs.version_line())
    cluster = options.cluster
    where = cluster.node_rank, cluster.nnodes, cluster.master_addr, cluster.master_port
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    while True:
        logger.info("Node %d of %d takes roles from rank 0 at %s:%d.", *where)
        try:
            connection, _ = join_leader(place_of(cluster), about_roles(options))
        except (GangRefused, OSError) as error:
            raise StartError(f"Node {cluster.node_rank} cannot serve: {error}") from error
        why = answer_calls(connection, Starts())
        if why is None:
            logger.info("Rank 0 has ended, and node %d ends with it.", cluster.node_rank)
            return
        logger.error("Node %d has lost rank 0: %s.", cluster.node_rank, why)
