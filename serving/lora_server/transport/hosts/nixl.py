"""Processes joined by NIXL: messages are written into the peer's slots by UCX, over RDMA or TCP.

As with `tcp` each side has slots of its own and a thread beside them. The thread writes what lies
in the own slot into the peer's, header and all, by one transfer with a notification behind it, and
steps the counters that the own endpoint waits for. Addresses are exchanged over the connection by
which both sides have met, and its end says that the other has gone. The package is looked for only
when an endpoint is opened. Slots are host memory.
"""

import base64
import contextlib
import functools
import importlib
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from serving.lora_server.transport import handshake, socket_messages
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.hosts import tcp
from serving.lora_server.transport.hosts.nixl_relay import Landing, Relay
from serving.lora_server.transport.hosts.tcp import Tcp
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.slots import Joined, SlotClient, SlotServer
from serving.lora_server.transport.socket_messages import owned, unix_listener

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
# With UCX's error handling, without which a dead peer is not noticed, shared memory is used only
# where it is told to handle errors too: 6 instead of 32 us for a small message on one host.
_UCX = {"UCX_POSIX_ERROR_HANDLING": "y", "UCX_SYSV_ERROR_HANDLING": "y"}
_BACKEND = {"ucx_error_handling_mode": "peer"}


class Agent(Protocol):
    """Methods used of a nixl_agent."""

    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> Any: ...
    def register_memory(self, reg_list: Any, mem_type: str) -> Any: ...
    def deregister_memory(self, reg_list: Any) -> None: ...
    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any: ...
    def initialize_xfer(
        self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: str, notif: bytes
    ) -> Any: ...
    def transfer(self, handle: Any) -> str: ...
    def check_xfer_state(self, handle: Any) -> str: ...
    def release_xfer_handle(self, handle: Any) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


MakeAgent = Callable[[str], Agent]


def make_agent(name: str) -> Agent:
    """Return an agent of this name with UCX behind it, polled by nobody but its user.

    NIXL's own thread spins on a core for each agent. Raises NotImplementedError where NIXL is not
    installed.
    """
    package = _package()
    for key, value in _UCX.items():
        os.environ.setdefault(key, value)  # UCX reads them when the first agent is made
    config = package.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = package.nixl_agent(name, config)
    agent.create_backend("UCX", _BACKEND)
    return agent


def _package() -> Any:
    for name in _PACKAGES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise NotImplementedError(
        "The transport nixl needs the package nixl-cu13: install lora-jax[nixl], or choose another "
        "transport."
    )


def open_server(
    path: str | Path,
    terms: Terms,
    rank: int,
    *,
    pull: bool = False,
    agents: MakeAgent = make_agent,
) -> SlotServer:
    """Return a server that clients of this user and host find at a Unix socket.

    Raises ValueError as shared_memory.open_server does, and NotImplementedError without NIXL.
    """
    transport = _transport(agents, None)
    return handshake.open_server(transport, unix_listener(path), terms, rank, pull=pull)


def open_client(
    paths: Sequence[str | Path],
    terms: Terms,
    *,
    patience: float = 10.0,
    pull: bool = False,
    agents: MakeAgent = make_agent,
) -> SlotClient:
    """Return a client of the servers at `paths`; see handshake.open_client for the errors."""
    transport = _transport(agents, None)
    return handshake.open_client(transport, paths, terms, patience=patience, pull=pull)


def open_far_server(
    listening: socket.socket,
    terms: Terms,
    rank: int,
    secret: bytes,
    *,
    agents: MakeAgent = make_agent,
) -> SlotServer:
    """Return a server for clients of other hosts with the same secret; see tcp.open_server."""
    with owned(listening):
        transport = _transport(agents, secret)
    return handshake.open_server(transport, listening, terms, rank, pull=False)


def open_far_client(
    addresses: Sequence[tuple[str, int]],
    terms: Terms,
    secret: bytes,
    *,
    patience: float = 10.0,
    agents: MakeAgent = make_agent,
) -> SlotClient:
    """Return a client of the servers at (host, port); see tcp.open_client."""
    transport = _transport(agents, secret)
    return handshake.open_client(transport, addresses, terms, patience=patience, pull=False)


def _transport(agents: MakeAgent, secret: bytes | None) -> Tcp:
    """Return a transport with slots on both sides whose relay is NIXL; without NIXL, say so now."""
    if agents is make_agent:
        _package()
    relay = functools.partial(_relay, agents)
    return Tcp(tcp.NO_SECRET if secret is None else secret, relay)


def _relay(
    agents: MakeAgent, shapes: Shapes, connection: socket.socket, slots: Joined, beside_client: bool
) -> None:
    """Carry messages until the connection ends, or something comes that is not a message."""
    name = f"{'instance' if beside_client else 'server'}-{secrets.token_hex(8)}"
    agent = agents(name)
    with Relay(shapes, slots, agent, beside_client=beside_client) as relay:
        try:
            _introduce(relay, name, agent, connection)
        except (OSError, ValueError, TransportError):
            return
        relay.run(connection)


def _introduce(relay: Relay, name: str, agent: Agent, connection: socket.socket) -> None:
    """Tell each other's agents where messages are to be written."""
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    landing = relay.landing
    greeting = {
        "agent": name,
        "metadata": metadata,
        "address": landing.address,
        "bytes": landing.num_bytes,
    }
    socket_messages.send(connection, greeting)
    theirs = socket_messages.receive(connection)[0]
    wanted = {"agent": str, "metadata": str, "address": int, "bytes": int}
    if any(not isinstance(theirs.get(key), kind) for key, kind in wanted.items()):
        raise TransportError(
            "The peer answered in another protocol; start both sides from the same release."
        )
    if theirs["bytes"] != relay.outgoing.num_bytes:
        raise TransportError(f"The peer's slot has {theirs['bytes']} bytes.")
    agent.add_remote_agent(base64.b64decode(theirs["metadata"]))
    relay.meet(theirs["agent"], Landing(theirs["address"], theirs["bytes"]))
