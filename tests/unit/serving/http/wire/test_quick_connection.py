"""Answers have the bytes that h11 gives them, in pieces and whole."""

import h11
import pytest

from serving.http.wire.quick_connection import QuickConnection

REQUEST = b"GET / HTTP/1.%d\r\nHost: x\r\n\r\n"


def asked(kind, minor=1, request=REQUEST):
    connection = kind(h11.SERVER)
    connection.receive_data(request % minor)
    assert type(connection.next_event()) is h11.Request
    connection.next_event()
    return connection


def answers(kind, headers, pieces, minor=1):
    """What goes out for two requests, one after the other if the connection lives on."""
    connection, sent = asked(kind, minor), []
    for _ in range(2):
        sent.append(connection.send(h11.Response(status_code=200, headers=headers)))
        sent += [connection.send(h11.Data(data=piece)) for piece in pieces]
        sent.append(connection.send(h11.EndOfMessage()))
        if connection.our_state is not h11.DONE:
            return sent
        connection.start_next_cycle()
        connection.receive_data(REQUEST % minor)
        connection.next_event()
        connection.next_event()
    return sent


@pytest.mark.parametrize(
    ("headers", "pieces", "minor"),
    [
        ([], [b"a", b"", b"b" * 300, b"data: {}\n\n"], 1),
        ([], [b"a", b"bc"], 0),  # the end of the connection is that of the answer
        ([(b"content-length", b"3")], [b"a", b"bc"], 1),
        ([(b"x-note", b"transfer-encoding: chunked")], [b"abc"], 0),
    ],
)
def test_the_bytes_are_those_of_h11(headers, pieces, minor):
    given = headers, pieces, minor
    assert answers(QuickConnection, *given) == answers(h11.Connection, *given)


def test_misuse_is_refused_as_by_h11():
    for kind in (h11.Connection, QuickConnection):
        connection = asked(kind)
        with pytest.raises(h11.LocalProtocolError):
            connection.send(h11.Data(data=b"a"))  # before its head
        connection = asked(kind)
        connection.send(h11.Response(status_code=200, headers=[]))
        connection.send(h11.EndOfMessage())
        with pytest.raises(h11.LocalProtocolError):
            connection.send(h11.Data(data=b"a"))
