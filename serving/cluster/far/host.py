"""A host elsewhere: its roles' processes call the switchboard of this one. No jax, no ray."""

from multiprocessing.connection import Connection

from serving.cluster.far.switchboard import Switchboard, Ticket
from serving.runtime.role_host import AbstractRoleHost


class AbstractFarHost(AbstractRoleHost):
    """Another host, for one start of a role."""

    has_own_gpus = True

    def __init__(self, address: str, board: Switchboard):
        self.address = address
        self._board, self._tickets = board, list[Ticket]()

    def pipe(self) -> tuple[Connection, Ticket]:
        """See AbstractRoleHost: a connection over TCP, to be made by the process."""
        ours, ticket = self._board.ticket()
        self._tickets.append(ticket)
        return ours, ticket

    def _drop_pipes(self) -> None:
        """End the connections of a process that has ended."""
        for ticket in self._tickets:
            self._board.drop(ticket)
