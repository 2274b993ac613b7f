"""Addresses of instances: a Unix socket on this host, or a port of another one. No jax."""

import dataclasses
import socket

# A host that lost power says nothing: its connections are over after 5 s without an answer.
_OPTIONS = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): 2,
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): 5000,  # ms
    (socket.IPPROTO_TCP, "TCP_NODELAY"): 1,
}
HEADER = b"proxy-authorization"  # of the front's secret; clients' keys have their own


@dataclasses.dataclass(frozen=True)
class FarAddress:
    """Address of an instance on another host, which wants the secret; port 0: not known yet."""

    host: str
    port: int
    secret: str = dataclasses.field(repr=False)

    @property
    def header(self) -> tuple[bytes, bytes]:
        """The secret as an HTTP header."""
        return HEADER, f"Bearer {self.secret}".encode()


Address = str | FarAddress


def headers_of(address: Address) -> tuple[tuple[bytes, bytes], ...]:
    """Return what a request to the address must say besides its own headers."""
    return (address.header,) if isinstance(address, FarAddress) else ()


def new_socket(address: Address) -> tuple[socket.socket, str | tuple[str, int]]:
    """Return a socket for a connection to the address, and what to connect it to."""
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    notice_lost_hosts(sock)
    return sock, (address.host, address.port)


def notice_lost_hosts(sock: socket.socket) -> None:
    """Let a TCP connection end when the other host does not answer any more."""
    for (level, name), value in _OPTIONS.items():
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(level, getattr(socket, name), value)
