"""Clients and servers that meet over a socket: terms are compared, then slots are set up."""

import abc
import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.client_base import AbstractConnector
from serving.lora_server.transport.compatibility import Terms, mismatch
from serving.lora_server.transport.slots import Joined, SlotClient, SlotServer
from serving.lora_server.transport.socket_messages import (
    Address,
    Admit,
    Guest,
    Listener,
    Watch,
    call,
    owned,
    wait_for_listener,
)

LAST_EPOCH = 1 << 62
_MOST_STEPS = 1 << 32  # of epochs at once: a server counts its clients


class HasGuests(Protocol):
    """A server whose clients come over a listening socket."""

    def on_close(self, callback: Callable[[], None]) -> None:
        """Have something closed with the server, before its slots."""
        ...


class AbstractTransport[Server: HasGuests](abc.ABC):
    """Set-up of a channel's slots at both ends of a connection."""

    num_fds: int  # descriptors in the server's answer
    admit_client: Admit | None = None  # run by the server before anything is said
    admit_server: Admit | None = None  # run by the client

    def greeting(self) -> dict[str, object]:
        """Return what a client says besides the terms."""
        return {}

    @abc.abstractmethod
    def welcome(self, server: Server, greeting: dict, last_epoch: int) -> Guest:
        """Let in a client that agrees to the terms; return what the server does with it.

        Raises TransportError to refuse it.
        """

    @abc.abstractmethod
    def client_slots(self, terms: Terms, fds: list[int]) -> tuple[int, int]:
        """Return descriptors of the client's channel and bell; on success they own `fds`.

        Raises TransportError where the server sent what it should not.
        """

    @abc.abstractmethod
    def client_stay(self, terms: Terms, joined: Joined) -> Callable[[socket.socket], None]:
        """Return what runs beside the client until the server has gone."""


def open_server(
    transport: AbstractTransport[SlotServer],
    listening: socket.socket,
    terms: Terms,
    rank: int,
    *,
    pull: bool,
) -> SlotServer:
    """Return a server that lets clients in at a listening socket, which it owns from now on.

    Raises ValueError for a rank outside the plan.
    """
    return let_in(transport, listening, terms, rank, lambda: SlotServer(terms.shapes, pull=pull))


def let_in[Server: HasGuests](
    transport: AbstractTransport[Server],
    listening: socket.socket,
    terms: Terms,
    rank: int,
    make_server: Callable[[], Server],
) -> Server:
    """Return the server that `make_server` gives; its clients come as open_server says.

    Raises ValueError for a rank outside the placement.
    """
    devices = terms.placement.devices
    with owned(listening):
        if not 0 <= rank < devices:
            raise ValueError(f"{terms.placement.name} has ranks 0 to {devices - 1}, not {rank}.")
        server = make_server()

    def welcome(greeting: dict) -> Guest:
        theirs, last_epoch = greeting.get("facts"), greeting.get("last_epoch")
        if not isinstance(theirs, dict) or not isinstance(last_epoch, int):
            raise TransportError(
                "The greeting is of another protocol; start both sides from the same release."
            )
        if not 0 <= last_epoch < LAST_EPOCH:
            raise TransportError(f"There is no epoch after {last_epoch}.")
        if wrong := mismatch(terms.facts(rank), theirs):
            raise TransportError(wrong)
        return transport.welcome(server, greeting, last_epoch)

    server.on_close(Listener(listening, welcome, transport.admit_client).close)
    return server


def open_client(
    transport: AbstractTransport,
    addresses: Sequence[Address],
    terms: Terms,
    *,
    patience: float,
    pull: bool,
    late: bool = False,
) -> SlotClient:
    """Return a client of the servers at `addresses`, in the order of their ranks.

    Waits up to `patience` seconds for each to listen, and as long for its answer; `late` ones are
    not waited for, and lost until a `rejoin`. Raises ValueError
    for a number of addresses that is not the plan's, and TransportError, saying what to change,
    where a server is not there or does not agree with `terms`.
    """
    connectors = callers(transport, addresses, terms, None if late else patience)
    return SlotClient(terms.shapes, connectors, pull=pull, late=late)


def callers(
    transport: AbstractTransport, addresses: Sequence[Address], terms: Terms, patience: float | None
) -> list[AbstractConnector]:
    """Return what joins each server, all of which listen; errors as open_client.

    None: nobody has to listen yet.
    """
    devices = terms.placement.devices
    if len(addresses) != devices:
        raise ValueError(
            f"{terms.placement.name} has {devices} ranks and {len(addresses)} addresses were given."
        )
    connectors = [
        _Connector(transport, address, terms, rank) for rank, address in enumerate(addresses)
    ]
    if patience is not None:
        for caller in connectors:
            caller.wait_for(patience)
    return list(connectors)


class _Connector(AbstractConnector):
    """Joins by a handshake; the end of its connection is the end of the server."""

    def __init__(self, transport: AbstractTransport, address: Address, terms: Terms, rank: int):
        self._transport, self._address, self._terms, self._rank = transport, address, terms, rank
        self._patience = 0.0  # with the next answer
        self._connection: socket.socket | None = None
        self._watch: Watch | None = None

    def wait_for(self, seconds: float) -> None:
        """Return when somebody listens. Raises TransportError if nobody does for `seconds`.

        The first `join` then waits for an answer as long: a rank of a busy machine is late with
        both. Later ones ask ranks that were lost, and are tried again.
        """
        self._patience = seconds
        try:
            wait_for_listener(self._address, seconds)
        except OSError as error:
            raise self._not_there(error) from error

    def join(self, last_epoch: int) -> Joined:
        transport = self._transport
        greeting = {"facts": self._terms.facts(self._rank), "last_epoch": last_epoch}
        greeting |= transport.greeting()
        patience, self._patience = self._patience, 0.0
        how = transport.num_fds, transport.admit_server, patience
        try:
            connection, answer, fds = call(self._address, greeting, *how)
        except TransportError:
            raise
        except OSError as error:
            raise self._not_there(error) from error
        try:
            epoch = answer.get("epoch")
            last_allowed = min(last_epoch + _MOST_STEPS, LAST_EPOCH)
            if not isinstance(epoch, int) or not last_epoch < epoch <= last_allowed:
                raise TransportError(
                    f"{self._address} gave epoch {epoch} after {last_epoch}, allowed are "
                    f"{last_epoch + 1} to {last_allowed}."
                )
            channel, bell = transport.client_slots(self._terms, fds)
        except BaseException:
            connection.close()
            for fd in fds:
                os.close(fd)
            raise
        self._connection = connection
        return Joined(channel, bell, epoch)

    def watch(self, joined: Joined, lost: Callable[[], None]) -> None:
        if self._connection is not None:
            stay = self._transport.client_stay(self._terms, joined)
            self._watch = Watch(self._connection, stay, lost)

    def leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        elif self._connection is not None:
            self._connection.close()
        self._watch = self._connection = None

    def _not_there(self, error: OSError) -> TransportError:
        return TransportError(
            f"No LoRA Server of rank {self._rank} answers at {self._address} ({error}); start it, "
            "or correct the address."
        )
