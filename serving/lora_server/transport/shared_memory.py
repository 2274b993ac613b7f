"""Processes of one host over shared memory: the CPU's transport between them."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.lora_server.transport import handshake
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.handshake import AbstractTransport
from serving.lora_server.transport.library import check_memory
from serving.lora_server.transport.shapes import PAGE
from serving.lora_server.transport.slots import Joined, SlotClient, SlotServer
from serving.lora_server.transport.socket_messages import Guest, unix_listener, wait_for_end


def open_server(path: str | Path, terms: Terms, rank: int, *, pull: bool = False) -> SlotServer:
    """Return a server that clients of this user find at the Unix socket `path`.

    Raises ValueError for a rank outside the plan, and if another process listens there. The path
    of a dead process is taken over.
    """
    return handshake.open_server(_SharedMemory(), unix_listener(path), terms, rank, pull=pull)


def open_client(
    paths: Sequence[str | Path],
    terms: Terms,
    *,
    patience: float = 10.0,
    pull: bool = False,
    late: bool = False,
) -> SlotClient:
    """Return a client of the servers at `paths`; see handshake.open_client for the errors."""
    options = {"pull": pull, "late": late}
    return handshake.open_client(_SharedMemory(), paths, terms, patience=patience, **options)


class _SharedMemory(AbstractTransport[SlotServer]):
    """The server's memory is the channel; the client maps it too."""

    num_fds = 2

    def welcome(self, server: SlotServer, greeting: dict, last_epoch: int) -> Guest:
        client, joined = server.join(last_epoch)
        fds = [joined.channel, joined.bell]
        return Guest({"epoch": joined.epoch}, fds, wait_for_end, lambda: server.leave(client))

    def client_slots(self, terms: Terms, fds: list[int]) -> tuple[int, int]:
        check_memory(fds[0], terms.shapes.channel_bytes)
        check_memory(fds[1], PAGE)
        return fds[0], fds[1]

    def client_stay(self, terms: Terms, joined: Joined) -> Callable[[socket.socket], None]:
        return wait_for_end
