"""An instance is reached at a Unix socket, or at a port of its host with the front's secret."""

import socket

from serving.cluster.addresses import FarAddress, headers_of, new_socket


def test_another_host_is_sent_the_secret_and_noticed_when_it_is_lost():
    far = FarAddress("127.0.0.1", 7, "s3")
    assert headers_of(far) == ((b"proxy-authorization", b"Bearer s3"),)
    assert "s3" not in repr(far)
    sock, where = new_socket(far)
    with sock:
        assert (where, sock.family) == (("127.0.0.1", 7), socket.AF_INET)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
    with new_socket(FarAddress("::1", 7, "s"))[0] as sock:
        assert sock.family == socket.AF_INET6


def test_this_host_needs_none():
    sock, where = new_socket("/run/i")
    with sock:
        assert (where, sock.family, headers_of("/run/i")) == ("/run/i", socket.AF_UNIX, ())
