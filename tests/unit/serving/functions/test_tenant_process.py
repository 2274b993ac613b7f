"""Process of one adapter: what it hands out, and why it does not start."""

import os
import socket
import threading

import pytest
from support.processes.server_process import ROOT

from lora_jax.memory.wire import close_all, receive_fds, receive_header
from serving.functions import tenant_process

MODEL = ROOT / "assets" / "tiny-moe"
ORDER = {"name": "law", "model": str(MODEL), "last_epoch": 3}
ORDER |= {"max_rank": 16, "max_rows": 8, "dtype": "float32"}


@pytest.fixture
def start():
    """Runs a process's life on a thread; returns our end of its connection."""
    kept = []

    def run(**order):
        ours, theirs = socket.socketpair()
        args = theirs, ORDER | order, lambda: 7
        thread = threading.Thread(target=tenant_process.run, args=args, daemon=True)
        thread.start()
        kept.append((ours, theirs, thread))
        return ours

    yield run
    for ours, theirs, thread in kept:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()
        theirs.close()


def test_it_hands_out_its_report_and_the_memory_of_its_channel(start):
    connection = start(adapter=str(MODEL / "adapters" / "law"))
    ready = receive_header(connection)
    fds = receive_fds(connection, 3)
    assert (ready["epoch"], ready["private_bytes"]) == (4, 7)
    assert set(ready["report"]["modules"]) >= {"q_proj", "experts.down_proj"}
    sizes = [os.fstat(fd).st_size for fd in fds[:2]]
    assert sizes[0] > sizes[1] == 4096
    close_all(fds)


def test_an_adapter_that_cannot_be_served_is_an_error_by_name(start):
    said = receive_header(start(adapter=str(MODEL / "adapters" / "nobody")))
    assert said["error"].startswith("Function 'law' cannot start: there is no folder")
