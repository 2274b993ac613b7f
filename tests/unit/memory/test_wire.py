"""Headers and descriptors between processes: whole, or an error and nothing kept."""

import json
import os
import resource
import socket
import time

import pytest
from support.processes.process_facts import open_files

from lora_jax.memory.wire import (
    BATCH,
    ShareError,
    close_all,
    is_readable,
    receive_fds,
    receive_header,
    send_fds,
    send_header,
)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_headers_arrive_one_by_one(ends):
    send_header(ends[0], {"a": [1, 2]})
    send_header(ends[0], {"b": None})
    assert [receive_header(ends[1]) for _ in range(2)] == [{"a": [1, 2]}, {"b": None}]


def test_more_descriptors_than_a_message_carries(ends):
    fds = [os.memfd_create(str(i)) for i in range(BATCH + 3)]
    send_fds(ends[0], fds)
    received = receive_fds(ends[1], len(fds))
    same = [os.fstat(a).st_ino == os.fstat(b).st_ino for a, b in zip(fds, received, strict=True)]
    for fd in (*fds, *received):
        os.close(fd)
    assert all(same)


def test_descriptors_that_do_not_all_come_are_closed(ends):
    before = open_files()
    with open("/dev/null") as file:
        send_fds(ends[0], [file.fileno()])
    with pytest.raises(ShareError, match="1 of 2 blocks"):
        receive_fds(ends[1], 2)
    assert open_files() <= before


def test_descriptors_beyond_the_limit_of_open_files_are_named(ends):
    before = open_files()
    fds = [os.memfd_create(str(i)) for i in range(8)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.dup(0)  # the first free number
    os.close(highest)
    try:
        send_fds(ends[0], fds)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
        with pytest.raises(ShareError, match=rf"3 of 8 .* may have {highest + 3} open .*ulimit -n"):
            receive_fds(ends[1], 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        close_all(fds)
    assert open_files() <= before


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200, reason="few open files")
def test_a_connection_of_any_number_is_readable_when_something_came(ends):
    """An agent of many connections gives its processes numbers above 1023."""
    number = 1100
    os.dup2(ends[1].fileno(), number)
    with socket.socket(fileno=number) as end:
        begin = time.monotonic()
        assert not is_readable(end, 0.05)
        assert time.monotonic() - begin >= 0.05
        assert not is_readable(end, 0)
        send_header(ends[0], {})
        assert is_readable(end, 60)
        receive_header(end)
        ends[0].shutdown(socket.SHUT_WR)
        assert is_readable(end, 60)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "not one of ours"),
        ((2).to_bytes(8, "little") + b"{]", "cannot be read"),
        ((2).to_bytes(8, "little") + b"[]", "it is a list"),
        ((99999).to_bytes(8, "little") + b"[" * 99999, "cannot be read: RecursionError"),
        ((9).to_bytes(8, "little") + b"{", "ended after 1 of 9"),
    ],
)
def test_other_talk_is_refused(ends, sent, words):
    ends[0].sendall(sent)
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ShareError, match=words):
        receive_header(ends[1])


def test_a_header_has_the_form_that_is_written_down(ends):
    send_header(ends[0], {"x": 1})
    length = int.from_bytes(ends[1].recv(8), "little")
    assert json.loads(ends[1].recv(length)) == {"x": 1}
