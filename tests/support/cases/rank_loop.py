"""The loop of a LoRA Server's rank in a thread, with a client that is asked for."""

import queue
import threading

import numpy as np

from lora_jax.adapters import reader
from serving.lora_server.server import RankServer
from serving.lora_server.transport.base import Request
from serving.lora_server.transport.shapes import GATE_UP

REFUSED = "refused"


class Transport:
    """One client whose requests wait in a queue; answers go to another."""

    def __init__(self):
        self.requests, self.answers = queue.SimpleQueue(), queue.SimpleQueue()
        self.stopped, self.closed = False, False

    def receive(self, seconds):
        try:
            return self.requests.get(timeout=seconds) if seconds else self.requests.get_nowait()
        except queue.Empty:
            return None

    def respond(self, request, deltas):
        self.answers.put(deltas)
        return True

    def refuse(self, request):
        self.answers.put(REFUSED)
        return True

    def abort(self):
        self.stopped = True

    def aborted(self):
        return self.stopped

    def close(self):
        self.closed = True


class Running:
    """The loop in a thread, with an adapter's digest by name."""

    def __init__(self, made, rank, adapters, transport=None):
        self.transport = transport or Transport()
        self.server = RankServer(
            rank, made.layout.moe_layers, made.catalogue, lambda: self.transport, host_bytes=1 << 20
        )
        self.adapters = adapters
        self.digests = {
            name: reader.read(path, made.catalogue).digest for name, path in adapters.items()
        }
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.server.open()

    def load(self, name, number, version=1, digest=None):
        self.server.load(number, self.adapters[name], digest or self.digests[name], version)

    def ask(self, numbers, experts, layer=1, version=1, site=GATE_UP):
        x = np.ones((16, 32), np.float32)
        ids = [np.resize(np.asarray(values, np.int32), 16) for values in (numbers, experts)]
        request = Request(1, 1, 1, layer, site, len(numbers), version, x, *ids)
        self.transport.requests.put(request)
        return self.transport.answers.get(timeout=60)


def load_within(seconds, loop, name, number):
    """Load on a thread that may be left behind: a loop that has failed would never answer it."""
    loader = threading.Thread(target=loop.load, args=(name, number), daemon=True)
    loader.start()
    loader.join(seconds)
    assert not loader.is_alive(), "the rank does not answer"
