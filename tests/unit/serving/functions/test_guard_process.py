"""The guard's process finds a flipped byte, which no importer could have written."""

import socket
import threading

import numpy as np
import pytest
from support.processes.process_facts import open_files

from lora_jax.memory.arena import Arena
from lora_jax.memory.host import HostMemory
from lora_jax.memory.wire import close_all, receive_header, send_fds, send_header
from serving.functions import guard_process

PAGES = "lora_jax_pages"
VALUES = {"a": np.arange(3000, dtype=np.float32), "b": np.arange(50, dtype=np.uint8)}


@pytest.fixture
def arena():
    memory = HostMemory()  # as the guard's process makes it
    made = Arena(memory, 1 << 17)
    arrays = {name: made.add(name, values) for name, values in VALUES.items()}
    yield made, memory, arrays
    arrays.clear()
    made.close()


@pytest.fixture
def connection(arena):
    ours, theirs = socket.socketpair()
    before = open_files()
    fds = arena[0].export()
    order = {"manifest": arena[0].manifest.fields()}
    thread = threading.Thread(target=guard_process.run, args=(theirs, order))
    thread.start()
    send_fds(ours, fds)
    close_all(fds)
    yield ours, before
    ours.close()
    thread.join(60)
    theirs.close()
    assert not thread.is_alive()


def test_it_says_the_digest_at_once_and_finds_a_flipped_byte_later(arena, connection):
    (made, memory, arrays), (connection, before) = arena, connection
    ready = receive_header(connection)
    held = [name for _, name in open_files() - before if PAGES in name]
    assert len(held) <= 1 < len(made.manifest.blocks)  # the file, not what came for each block
    assert ready == {"ready": True, "digest": made.manifest.digest, "changed": []}
    send_header(connection, {"id": 1})
    assert receive_header(connection) == {"id": 1, "value": []}
    address = arrays["b"].unsafe_buffer_pointer() + 7
    memory.write(address, np.array([200], np.uint8))  # by the owner's own mapping
    send_header(connection, {"id": 2})
    assert receive_header(connection) == {"id": 2, "value": ["b"]}
