"""Two ends of a TCP connection within this process."""

import socket


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends; what sets options of TCP takes no Unix sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]
