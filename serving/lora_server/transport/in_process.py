"""Client and server in one process: for tests, and for a server embedded beside its instance."""

from collections.abc import Sequence

from serving.lora_server.transport.client_base import AbstractConnector
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.slots import Joined, SlotClient, SlotServer


def open_server(shapes: Shapes, *, pull: bool = False) -> SlotServer:
    """Return a server without clients. Its loop belongs on a thread of its own.

    A program of a client that waits holds one of XLA's threads, so a process should have fewer
    clients than cores.
    """
    return SlotServer(shapes, pull=pull)


def open_client(servers: Sequence[SlotServer], *, pull: bool = False) -> SlotClient:
    """Return a client of all `servers`. Raises ValueError unless their shapes are equal."""
    shapes = {server.shapes for server in servers}
    if len(shapes) != 1:
        raise ValueError(f"a client needs servers of one shape, got {len(shapes)} shapes")
    return SlotClient(shapes.pop(), [_Direct(server) for server in servers], pull=pull)


class _Direct(AbstractConnector):
    """Joins by a call; a closed server is noticed by a wait that runs out."""

    def __init__(self, server: SlotServer):
        self._server, self._client = server, 0

    def join(self, last_epoch: int) -> Joined:
        self._client, joined = self._server.join(last_epoch)
        return joined

    def watch(self, joined: Joined, lost) -> None:
        pass

    def leave(self) -> None:
        self._server.leave(self._client)
