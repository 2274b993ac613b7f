"""The C++ end is built once and declared whole; shared memory is what it says it is."""

import fcntl
import mmap
import os
import re
import sys
from pathlib import Path

import pytest
from support.cases.transport_cases import terms_of

from serving.lora_server.transport import library
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.library import calls, check_memory, numbers, shared_memory
from serving.lora_server.transport.shapes import PAGE


def test_every_c_call_is_declared():
    source = Path(library.__file__).with_name("csrc") / "handlers.cc"
    defined = re.findall(
        r"^\w[\w ]* \*?lora_jax_transport_(\w+)\(", source.read_text(), re.MULTILINE
    )
    assert set(defined) == set(library._CALLS)
    with pytest.raises(AttributeError, match="no call 'lora_jax_transport_nothing'"):
        _ = calls().nothing


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="needs Linux, not darwin"):
        calls.__wrapped__()


def test_numbers_are_in_the_order_of_the_c_struct():
    shapes = terms_of("bfloat16").shapes
    found = list(numbers(shapes))
    assert found[:4] == [4, 24, 2, 4]
    assert found[4:9] == [64, 192, 320, shapes.request_slot, shapes.response_slot]
    assert found[9:] == [2, 20, 2, 12, 64, 12, 1216, 12, 1, 20, 64]


def test_calls_about_ends_that_are_not_there_do_nothing():
    call = calls()
    assert call.client_lost(999, 0) == 1
    assert call.client_attach(999, 0, 0, 0, 1) == 0
    assert call.server_attach(999, 0, 1) == 0
    assert call.server_receive(999, 10**12, bytes(64)) == -1
    assert call.server_answer(999, 1, bytes(64), None) == 0
    assert call.server_dropped(999) == 0
    for nothing in (call.client_free, call.server_free, call.server_abort):
        assert nothing(999) is None


def test_shared_memory_keeps_its_size():
    fd = shared_memory(2 * PAGE)
    check_memory(fd, 2 * PAGE)
    for size in (0, PAGE, 3 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with mmap.mmap(fd, 2 * PAGE) as memory:
        assert memory[:] == bytes(2 * PAGE)
    with pytest.raises(TransportError, match=f"memory of {2 * PAGE} bytes .*expected {PAGE}"):
        check_memory(fd, PAGE)
    os.close(fd)


def test_memory_that_may_shrink_is_refused():
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    with pytest.raises(TransportError, match="with seals 0x0, expected"):
        check_memory(fd, PAGE)
    os.close(fd)
    with pytest.raises(TransportError, match="not memory"):
        check_memory(fd, PAGE)
