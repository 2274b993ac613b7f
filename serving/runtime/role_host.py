"""The host on which the process of a role runs: this one, or another one. No jax."""

import abc
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from serving.runtime.child_process import AbstractFarProcess


class AbstractRoleHost(abc.ABC):
    """Starts a role's process, and connects it to this process."""

    address: str | None  # numeric, for TCP; None: this host, Unix sockets
    has_own_gpus: bool  # the process sees no GPUs but its own

    @abc.abstractmethod
    def pipe(self) -> tuple[Connection, Any]:
        """Return this side of a new connection, and what to pass to the process as the other one.

        The process gets a Connection in its place; `close` it here once the process is started.
        """

    @abc.abstractmethod
    def process(
        self, target: Callable[..., None], args: tuple[Any, ...], name: str
    ) -> BaseProcess | AbstractFarProcess:
        """Return a process that will call a module's function; it is not started yet."""

    @abc.abstractmethod
    def free_port(self) -> int:
        """Return a TCP port of the host on which nobody listens at the moment."""


class ThisHost(AbstractRoleHost):
    """This machine: the process is a child of this one."""

    address = None
    has_own_gpus = False

    def pipe(self) -> tuple[Connection, Connection]:
        """See AbstractRoleHost: both ends of a pipe."""
        return multiprocessing.get_context("spawn").Pipe()

    def process(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
        """See AbstractRoleHost."""
        context = multiprocessing.get_context("spawn")
        return context.Process(target=target, args=args, name=name, daemon=True)

    def free_port(self) -> int:
        """See AbstractRoleHost; roles of this host talk over Unix sockets and need none."""
        raise NotImplementedError("Roles of this host have Unix sockets.")


THIS_HOST = ThisHost()


class AbstractRoleHosts(abc.ABC):
    """Chooses the hosts of roles; what it says holds for one start of a role."""

    answer_here: bool  # all instances answer on this host, whatever hosts they are on besides

    @abc.abstractmethod
    def require_folder(self, folder: str) -> None:
        """Raise ConnectionError unless all hosts where instances answer see this host's folder.

        Raises OSError where this host cannot write it.
        """

    @abc.abstractmethod
    def instance(self, number: int) -> tuple[AbstractRoleHost, ...]:
        """Return the hosts of an LLM instance, that of its rank 0 first.

        Raises ConnectionError while there are none.
        """

    @abc.abstractmethod
    def server_rank(self, rank: int) -> AbstractRoleHost:
        """Return the host of a LoRA Server's rank. Raises ConnectionError while there is none."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the hosts back, when no role runs any more. A second call does nothing."""


class OneHost(AbstractRoleHosts):
    """This machine has all roles."""

    answer_here = True

    def require_folder(self, folder: str) -> None:
        """See AbstractRoleHosts."""

    def instance(self, number: int) -> tuple[AbstractRoleHost, ...]:
        """See AbstractRoleHosts."""
        return (THIS_HOST,)

    def server_rank(self, rank: int) -> AbstractRoleHost:
        """See AbstractRoleHosts."""
        return THIS_HOST

    def close(self) -> None:
        """See AbstractRoleHosts."""
