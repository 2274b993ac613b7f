"""An agent whose functions are threads: each answers HTTP with its name."""

import collections
import contextlib
import itertools
import os
import socket
import threading

from lora_jax.memory.wire import receive_fds, receive_header, send_header
from serving.functions.handle import DeviceFull, Function
from serving.functions.running import Running

PIDS = itertools.count(1)


def receive_nothing(connection: socket.socket) -> None:
    """Wait until a second connection is on its way, which none should be, or for half a second."""
    connection.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        connection.recv(1)


class FunctionsDouble:
    """An agent of functions that answer with their own name; some fail in a way of their own."""

    def __init__(self):
        self.functions: dict[str, Function] = {}
        self.starts: dict[str, int] = {}
        self.asked = collections.Counter[str]()  # connections by name
        self.go = threading.Event()  # for "slow"
        self.crashing: set[str] = set()  # these end before they are ready,
        self.mortal = {"mortal"}  # with a request ("mortal" with its first one),
        self.cut: set[str] = set()  # with a part of an answer out,
        self.silent: set[str] = set()  # or answer when they may `go`
        self.full = False
        sizes = {"parameters": 4_000_000, "other_parameters": 0, "bits_per_parameter": 4.5}
        self.quantization = {"format": "int4", "method": "gptq"} | sizes
        self.heads: list[str] = []

    def function(self, adapter=None, *, name=None, lazy=False):
        if name not in self.functions:
            self.functions[name] = Function(name, lambda: self.start(name), lazy=lazy)
        return self.functions[name]

    def start(self, name: str) -> Running:
        self.starts[name] = self.starts.get(name, 0) + 1
        if name == "foreign":
            raise ValueError("Function 'foreign' cannot start: /a/b/weights do not fit the base.")
        if name in self.crashing:
            raise ConnectionError("A process ended before it was ready.")
        if self.full:
            raise DeviceFull("Other functions are called; try again.")
        if name == "slow":
            assert self.go.wait(60)
        ours, theirs = socket.socketpair()
        threading.Thread(target=self.serve, args=(theirs, name), daemon=True).start()
        about = {"private_bytes": 7, "max_model_len": 64, "quantization": self.quantization}
        return Running(ours, next(PIDS), about)

    def serve(self, connection: socket.socket, name: str) -> None:
        # The agent may close a function while the word of its last answer is on its way.
        with connection, contextlib.suppress(OSError):
            while True:
                call = receive_header(connection)
                if call["call"] == "metrics":
                    text = "# TYPE up gauge\nup 1.0\n"
                    send_header(connection, {"id": call["id"], "value": text})
                    continue
                (fd,) = receive_fds(connection, 1)
                self.asked[name] += 1
                if name in self.mortal and (name != "mortal" or self.starts[name] == 1):
                    os.close(fd)  # whoever asks learns it before the process has ended
                    receive_nothing(connection)
                    return
                with socket.socket(fileno=fd) as http:
                    self.answer(http, name)
                if name in self.cut:
                    return
                with contextlib.suppress(OSError):  # its agent has ended: the next call says so
                    send_header(connection, {"id": call["id"], "value": None})

    def answer(self, http: socket.socket, name: str) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (more := http.recv(4096)):
                return  # whoever asked has given up
            head += more
        self.heads.append(head.decode())
        if name in self.silent:
            self.go.wait(60)
        text = name.encode()
        length = b"content-length: %d\r\n\r\n" % len(text)
        if name in self.cut:
            length, text = b"transfer-encoding: chunked\r\n\r\n", b"3\r\nlaw\r\n"
        with contextlib.suppress(ConnectionError):  # whoever asked has given up
            http.sendall(b"HTTP/1.1 200 OK\r\n" + length + text)

    def close(self) -> None:
        """End all functions."""
        self.go.set()
        for function in self.functions.values():
            function.close()
