"""Processes of one host over shared memory: the CPU's carrier between them."""

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.transport.base import TransportError
from serving.transport.library import check_memory
from serving.transport.rendezvous import Listener, Watch, call
from serving.transport.shapes import PAGE
from serving.transport.slots import AbstractConnector, Joined, SlotClient, SlotServer
from serving.transport.terms import Terms, mismatch

_RETRY_SECONDS = 0.02


def open_server(path: str | Path, terms: Terms, rank: int, *, pull: bool = False) -> SlotServer:
    """Return a server that clients find at the Unix socket `path`.

    Raises ValueError for a rank outside the plan, and if another process listens there. The path
    of a dead process is taken over.
    """
    devices = terms.placement.devices
    if not 0 <= rank < devices:
        raise ValueError(f"{terms.placement.name} has ranks 0 to {devices - 1}, not {rank}.")
    server = SlotServer(terms.shapes, pull=pull)
    try:
        listener = Listener(path, lambda said: _welcome(server, terms.facts(rank), said))
    except BaseException:
        server.close()
        raise
    server.on_close(listener.close)
    return server


def _welcome(
    server: SlotServer, facts: dict, said: dict
) -> tuple[dict, list[int], Callable[[], None]]:
    theirs, last_epoch = said.get("facts"), said.get("last_epoch")
    if not isinstance(theirs, dict) or not isinstance(last_epoch, int) or last_epoch < 0:
        raise TransportError("The greeting is not one of this package.")
    if wrong := mismatch(facts, theirs):
        raise TransportError(wrong)
    client, joined = server.join(last_epoch)
    return {"epoch": joined.epoch}, [joined.channel, joined.bell], lambda: server.leave(client)


def open_client(
    paths: Sequence[str | Path], terms: Terms, *, patience: float = 10.0, pull: bool = False
) -> SlotClient:
    """Return a client of the servers at `paths`, in the order of their ranks.

    Waits up to `patience` seconds for each to listen. Raises ValueError for a number of paths that
    is not the plan's, and TransportError, saying what to change, where a server is not there or
    does not agree with `terms`.
    """
    devices = terms.placement.devices
    if len(paths) != devices:
        raise ValueError(
            f"{terms.placement.name} has {devices} ranks and {len(paths)} addresses were given."
        )
    connectors = [_Caller(Path(path), terms, rank) for rank, path in enumerate(paths)]
    for connector in connectors:
        connector.wait_for(patience)
    return SlotClient(terms.shapes, connectors, pull=pull)


class _Caller(AbstractConnector):
    """Joins by a handshake; the end of its connection is the end of the server."""

    def __init__(self, path: Path, terms: Terms, rank: int):
        self._path, self._terms, self._rank = path, terms, rank
        self._connection: socket.socket | None = None
        self._watch: Watch | None = None

    def wait_for(self, seconds: float) -> None:
        """Return when somebody listens. Raises TransportError if nobody does for `seconds`."""
        end = time.monotonic() + seconds
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    return probe.connect(str(self._path))
                except OSError as error:
                    if time.monotonic() >= end:
                        raise self._not_there(error) from error
            time.sleep(_RETRY_SECONDS)

    def join(self, last_epoch: int) -> Joined:
        said = {"facts": self._terms.facts(self._rank), "last_epoch": last_epoch}
        try:
            connection, answer, fds = call(self._path, said, num_fds=2)
        except TransportError:
            raise
        except OSError as error:
            raise self._not_there(error) from error
        try:
            epoch = answer.get("epoch")
            if not isinstance(epoch, int) or not last_epoch < epoch < 1 << 63:
                raise TransportError(f"{self._path} gave epoch {epoch} after {last_epoch}")
            check_memory(fds[0], self._terms.shapes.channel_bytes)
            check_memory(fds[1], PAGE)
        except BaseException:
            connection.close()
            for fd in fds:
                os.close(fd)
            raise
        self._connection = connection
        return Joined(fds[0], fds[1], epoch)

    def watch(self, joined: Joined, lost: Callable[[], None]) -> None:
        if self._connection is not None:
            self._watch = Watch(self._connection, lost)

    def leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        elif self._connection is not None:
            self._connection.close()
        self._watch = self._connection = None

    def _not_there(self, error: OSError) -> TransportError:
        return TransportError(
            f"No LoRA Server of rank {self._rank} answers at {self._path} ({error}); start it, or "
            "correct the address."
        )
