"""Hosts of a Ray cluster for the roles of one command: joined, checked, given back.

Ray places, watches and kills. Requests, rows, leases and commands go between the processes, over
connections of their own; no call of Ray is on their way.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serving.api.config import EngineConfig
from serving.cluster.far.actor import AUTH, RoleActor
from serving.cluster.far.folder import require_seen
from serving.cluster.far.host import AbstractFarHost
from serving.cluster.far.member import call_bytes
from serving.cluster.far.switchboard import Switchboard
from serving.cluster.ray.groups import INSTANCE, RANK, Group, HostRoom
from serving.cluster.ray.process import RayProcess
from serving.runtime.about import about_of, difference
from serving.runtime.role_host import AbstractRoleHost, AbstractRoleHosts

logger = logging.getLogger(__name__)

_GROUP_S = 60  # for Ray to find room; another job may be giving it back
_ACTOR_S = 120.0  # for a Python process with this package, on a slow machine
_SHORT_S = 10.0
_THREADS = 4  # of an actor: one runs the process, others answer questions


class RayHost(AbstractFarHost):
    """The host of one bundle, for one start of a role."""

    def __init__(
        self,
        actor: Any,
        address: str,
        board: Switchboard,
        environ: Mapping[str, str],
        lost: Callable[[], None],
    ):
        super().__init__(address, board)
        self.actor, self.where = actor, address
        self._environ, self._lost = environ, lost

    def process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> RayProcess:
        """See AbstractRoleHost."""
        return RayProcess(self.actor, call_bytes(name, target, args), self._environ, self._ended)

    def free_port(self) -> int:
        """See AbstractRoleHost. Raises ConnectionError when the host does not answer."""
        return _answers([self.actor.free_port.remote(self.address)], _SHORT_S)[0]

    def sees(self, path: str, content: bytes) -> bool:
        """Return whether a file is there, with this content. Raises ConnectionError."""
        return _answers([self.actor.sees.remote(path, content)], _SHORT_S)[0]

    def _ended(self, is_lost: bool) -> None:
        self._drop_pipes()
        if is_lost:
            self._lost()


class RayHosts(AbstractRoleHosts):
    """Placement groups, one for each role, and an actor in each of their bundles."""

    answer_here = False  # Ray may place them anywhere, at each start

    def __init__(
        self,
        groups: Sequence[Group],
        config: EngineConfig,
        environ: Mapping[str, str],
        *,
        needs_tokens: bool = True,
    ):
        """Take the room of all groups. Ray is joined already, and left by `close`.

        `environ` is set in every process. Raises ConnectionError for a host that does not fit this
        one, and where there is no room now.
        """
        self._groups = {(group.kind, group.number): group for group in groups}
        self._config, self._environ = config, dict(environ)
        self._lock = threading.Lock()
        self._placed: dict[tuple[str, int], Any] = {}
        self._fresh: dict[tuple[str, int], tuple[RayHost, ...]] = {}
        self._closed = False
        self._about = about_of(config) | ({AUTH: "token"} if needs_tokens else {})
        self._board = Switchboard(ray.util.get_node_ip_address())
        try:
            for key, group in self._groups.items():  # all are asked for before one is waited for
                self._placed[key] = _group(group)
            self._fresh = {key: self._hosts(key, placed) for key, placed in self._placed.items()}
            self._check([host for hosts in self._fresh.values() for host in hosts])
        except BaseException:
            self.close()
            raise
        for key, hosts in self._fresh.items():
            where = ", ".join(host.where for host in hosts)
            logger.info("Ray has placed %s on %s.", self._groups[key].name, where)

    def instance(self, number: int) -> tuple[AbstractRoleHost, ...]:
        """See AbstractRoleHosts."""
        return self._start((INSTANCE, number))

    def server_rank(self, rank: int) -> AbstractRoleHost:
        """See AbstractRoleHosts."""
        return self._start((RANK, rank))[0]

    def require_folder(self, folder: str) -> None:
        """See AbstractRoleHosts."""
        hosts = {host.where: host for some in self._fresh.values() for host in some}
        require_seen(folder, {f"host {where}": host.sees for where, host in sorted(hosts.items())})

    def close(self) -> None:
        """See AbstractRoleHosts; then Ray is left."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for group in self._placed.values():
                with contextlib.suppress(RayError, ValueError):
                    remove_placement_group(group)
        self._board.close()
        ray.shutdown()

    def _start(self, key: tuple[str, int]) -> tuple[RayHost, ...]:
        """Return the hosts for one start of a role: actors that have run nothing yet."""
        with self._lock:
            if self._closed:
                raise ConnectionError("The cluster is closed.")
            hosts = self._fresh.pop(key, None)
            if hosts is not None:
                return hosts
            placed = self._placed.get(key)
            if placed is None:
                placed = self._placed[key] = _group(self._groups[key])
        hosts = self._hosts(key, placed)
        self._check(hosts)
        return hosts

    def _hosts(self, key: tuple[str, int], placed: Any) -> tuple[RayHost, ...]:
        """Return new actors, one in each bundle of a role's group, which Ray has placed or will."""
        group = self._groups[key]
        if not placed.wait(_GROUP_S):
            self._lose(key, placed)
            raise ConnectionError(
                f"Ray has found no room for {group.name} ({group.bundles}) within {_GROUP_S} s; "
                "other jobs use it, or hosts are lost: see ray status."
            )
        address_of = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = placement_group_table(placed)["bundles_to_node_id"]
        actors = [_actor(group, placed, bundle) for bundle in range(group.hosts)]
        return tuple(
            RayHost(
                actor,
                address_of[nodes[bundle]],
                self._board,
                self._environ,
                lambda: self._lose(key, placed),
            )
            for bundle, actor in enumerate(actors)
        )

    def _check(self, hosts: Sequence[RayHost]) -> None:
        """Raise ConnectionError for a host with another model or version than this one."""
        abouts = _answers([host.actor.about.remote(self._config) for host in hosts], _ACTOR_S)
        for host, about in zip(hosts, abouts, strict=True):
            if AUTH not in self._about:
                about.pop(AUTH, None)
            why = about.get("why") or difference(self._about, about, "on this host")
            if why:
                raise ConnectionError(
                    f"Host {host.address} does not fit: {why}. All hosts need the same release and "
                    "the model at the same path, and Ray there the same RAY_AUTH_MODE."
                )

    def _lose(self, key: tuple[str, int], placed: Any) -> None:
        """Give a group up whose host does not answer; the next start asks for another."""
        with self._lock:
            if self._placed.get(key) is not placed:  # given up before; another may be in its place
                return
            del self._placed[key]
        logger.warning("The host of %s does not answer.", self._groups[key].name)
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(placed)


def _group(group: Group) -> Any:
    return placement_group(group.bundles, strategy=group.strategy, name=group.name)


def _actor(group: Group, placed: Any, bundle: int) -> Any:
    """Return an actor with all of its bundle, which Ray never starts anew."""
    where = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle)
    options = {
        "num_cpus": 1,
        "num_gpus": group.gpus,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": _THREADS,
        "scheduling_strategy": where,
    }
    return ray.remote(RoleActor).options(**options).remote()


def _answers(calls: Sequence[Any], limit_s: float) -> list[Any]:
    """Return what actors answer. Raises ConnectionError when one does not."""
    try:
        return ray.get(list(calls), timeout=limit_s)
    except RayError as error:
        text = (str(error).strip() or repr(error)).splitlines()[-1]
        raise ConnectionError(
            f"Ray runs no actor of this command on some host: {text}. "
            f"All hosts need this package, and Ray there the same {AUTH}."
        ) from error


def rooms() -> list[HostRoom]:
    """Return the living hosts of the cluster that was joined."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        HostRoom(
            node["NodeManagerAddress"],
            node["Resources"].get("GPU", 0.0),
            node["Resources"].get("CPU", 0.0),
        )
        for node in alive
    ]
