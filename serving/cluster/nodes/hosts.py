"""Hosts of --nnodes for the roles of one command: each host's command starts those of its own.

Rank 0 has the front and the supervisor. The other nodes' agents connect to it and prove the secret
of --nodes-secret-file. The roles talk to rank 0 and to each other over connections of their own.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from typing import Any

from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster.far.callers import take_callers
from serving.cluster.far.folder import require_seen
from serving.cluster.far.host import AbstractFarHost
from serving.cluster.far.member import call_bytes
from serving.cluster.far.process import AbstractActorProcess
from serving.cluster.far.switchboard import Switchboard
from serving.cluster.nodes.agent import OwnNode, about_roles, place_of
from serving.cluster.nodes.link import AbstractNode, FarNode
from serving.cluster.nodes.seats import INSTANCE, RANK, Role, Seat, seats_of
from serving.runtime.gang_stream import (
    Connection,
    GangPlace,
    GangRefused,
    listen,
    reach_of,
    welcome,
)
from serving.runtime.leaving import leave
from serving.runtime.role_host import AbstractRoleHost, AbstractRoleHosts

logger = logging.getLogger(__name__)

_SHORT_S = 10.0  # for an agent's answer
_AT_WORK_S = 1.0
_LOOK_S = 0.5  # a wait for nodes, after which signals are looked at
_FREE_S = 3.0  # for a node that comes back, until its old connection is given up


class NodeProcess(AbstractActorProcess):
    """One start of a role by a node's agent."""

    def __init__(
        self,
        node: AbstractNode,
        start: int,
        payload: bytes,
        gpus: tuple[int, int],
        ended: Callable[[bool], None],
    ):
        """`gpus` are as `agent.Starts.call` has them; the rest is AbstractActorProcess's."""
        super().__init__(ended)
        self._node, self._start = node, start
        self._order = payload, gpus

    def is_at_work(self) -> bool:
        """See AbstractFarProcess."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            return self._node.call(self._start, "is_at_work").result(_AT_WORK_S)
        return False

    def _begin(self) -> Future[Any]:
        return self._node.call(self._start, "run", *self._order)

    def _status(self, running: Any) -> int:
        try:
            return running.result()
        except ConnectionError as error:
            logger.error("A role's process on %s is given up: %s", self._node.address, error)
            return -signal.SIGKILL

    def _end_actor(self) -> None:
        self._node.call(self._start, "kill")


class NodeHost(AbstractFarHost):
    """A node, for one start of a role."""

    def __init__(self, node: AbstractNode, start: int, seat: Seat, board: Switchboard):
        super().__init__(node.address, board)
        self._node, self._start = node, start
        self._gpus = seat.first_gpu, seat.num_gpus

    def process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> NodeProcess:
        """See AbstractRoleHost."""
        call = call_bytes(name, target, args)
        return NodeProcess(self._node, self._start, call, self._gpus, self._ended)

    def free_port(self) -> int:
        """See AbstractRoleHost. Raises ConnectionError when the node does not answer."""
        return _answer(self._node.call(self._start, "free_port", self.address))

    def sees(self, path: str, content: bytes) -> bool:
        """Return whether a file is there, with this content. Raises ConnectionError."""
        return _answer(self._node.call(self._start, "sees", path, content))

    def _ended(self, is_lost: bool) -> None:
        del is_lost  # the node is, or its next start is as good as any
        self._drop_pipes()


class NodeHosts(AbstractRoleHosts):
    """All nodes; one that is lost may come back, and its roles wait for it."""

    def __init__(
        self, seats: Mapping[Role, tuple[Seat, ...]], place: GangPlace, about: Mapping[str, Any]
    ):
        """Return when all nodes are there. `about` is as of gang_stream.

        Raises GangRefused for a node that does not fit, when one does not come in time, and for an
        address or a port that this host does not have free.
        """
        self._seats, self._place, self._about = seats, place, about
        fronts = {some[0].node for (kind, _), some in seats.items() if kind == INSTANCE}
        self.answer_here = fronts == {0}
        self._changed = threading.Condition()
        self._closed, self._refused = False, list[GangRefused]()
        self._starts = itertools.count()
        self._listening = listen(place.address)
        own: str = self._listening.getsockname()[0]
        self._nodes: dict[int, AbstractNode] = {0: OwnNode(own)}
        self._board = Switchboard(own)
        try:
            take_callers(self._listening, self._admit, "nodes")
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    def instance(self, number: int) -> tuple[AbstractRoleHost, ...]:
        """See AbstractRoleHosts."""
        return self._hosts((INSTANCE, number))

    def server_rank(self, rank: int) -> AbstractRoleHost:
        """See AbstractRoleHosts."""
        return self._hosts((RANK, rank))[0]

    def require_folder(self, folder: str) -> None:
        """See AbstractRoleHosts."""
        roles = [role for role in self._seats if role[0] == INSTANCE]
        hosts = {self._seats[role][0].node: self._hosts(role)[0] for role in roles}
        require_seen(folder, {f"node {n}": host.sees for n, host in sorted(hosts.items())})

    def close(self) -> None:
        """See AbstractRoleHosts; the other nodes' commands end."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            nodes = list(self._nodes.values())
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for node in nodes:
            node.close()
        self._board.close()

    def _hosts(self, role: Role) -> tuple[NodeHost, ...]:
        """Return a role's hosts for one start of it. Raises ConnectionError for a lost node."""
        hosts = []
        for seat in self._seats[role]:
            with self._changed:
                node = None if self._closed else self._nodes.get(seat.node)
                start = next(self._starts)
            if node is None:
                raise ConnectionError(f"Node {seat.node} is not there.")
            hosts.append(NodeHost(node, start, seat, self._board))
        return tuple(hosts)

    def _wait_for_all(self) -> None:
        end_s, (host, port) = time.monotonic() + self._place.wait_s, self._place.address
        others = ", ".join(map(str, range(1, self._place.size)))
        text = "Rank 0 waits at %s:%d for node %s.%s"
        logger.info(text, host, port, others, reach_of(host))
        with self._changed:
            while missing := sorted(set(range(self._place.size)) - set(self._nodes)):
                if self._refused:
                    raise self._refused[0]
                left_s = end_s - time.monotonic()
                # In turns: a signal that comes just before a wait is handled when that ends.
                if not self._changed.wait(max(0.0, min(_LOOK_S, left_s))) and left_s <= _LOOK_S:
                    raise GangRefused(
                        f"Nodes {missing} of {self._place.size} have not come within "
                        f"{self._place.wait_s:g} s."
                    )

    def _admit(self, sock: socket.socket, address: str) -> None:
        """Take a node that knows the secret and fits."""
        connection = Connection(sock)
        try:
            rank = welcome(connection, self._place, self._about, "", _Taken(self._is_free))
        except (OSError, KeyError, TypeError, ValueError) as error:
            logger.warning("Rejected a connection from %s: %s", address, error)
            connection.close()
            if isinstance(error, GangRefused):
                with self._changed:
                    self._refused.append(error)
                    self._changed.notify_all()
            return
        with self._changed:
            is_wanted = not self._closed and rank not in self._nodes
            if is_wanted:
                lost = functools.partial(self._lose, rank)
                self._nodes[rank] = FarNode(connection, address, lost)
                self._changed.notify_all()
        if is_wanted:
            logger.info("Node %d is there, at %s.", rank, address)
            return
        if self._closed:  # since it was welcomed: it is not to wait for this command
            with contextlib.suppress(OSError):
                connection.send(None)
        connection.close()

    def _is_free(self, rank: int) -> bool:
        """Return whether no node has this rank, or leaves it soon."""
        with self._changed:
            return self._changed.wait_for(lambda: rank not in self._nodes, _FREE_S)

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if self._closed:
                return
            del self._nodes[rank]
            self._changed.notify_all()
        logger.error("Node %d is lost, and its roles wait for it: %s", rank, why)


class _Taken(Container[int]):
    """The ranks that are not free."""

    def __init__(self, is_free: Callable[[int], bool]):
        self._is_free = is_free

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and not self._is_free(rank)


def meet_nodes(options: Options) -> NodeHosts:
    """Return the hosts for all roles when all nodes are there.

    Until the front answers, SIGTERM ends the other nodes with this process. Raises StartError for
    nodes that do not come or do not fit.
    """
    signal.signal(signal.SIGTERM, leave)
    cluster, devices = options.cluster, options.engine.tensor_parallel_size
    seats = seats_of(cluster.instances, devices, cluster.lora_server, cluster.nnodes)
    try:
        return NodeHosts(seats, place_of(cluster), about_roles(options))
    except (GangRefused, OSError) as error:
        raise StartError(f"Cannot serve on {cluster.nnodes} nodes: {error}") from error


def options_of_roles(options: Options) -> Options:
    """Return the options as the processes get them: a role of several is on one host."""
    if not options.cluster.spreads_roles:
        return options
    return dataclasses.replace(options, cluster=dataclasses.replace(options.cluster, nnodes=1))


def _answer(future: Future[Any]) -> Any:
    """Return a node's answer. Raises ConnectionError when it does not come in time."""
    try:
        return future.result(_SHORT_S)
    except TimeoutError as error:
        raise ConnectionError(f"A node does not answer within {_SHORT_S:g} s.") from error
