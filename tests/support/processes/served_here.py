"""A server on the test's own thread, from its start to SIGTERM, and a client on another one."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
from support.kept_logging import kept_logging

from serving.cli.options import Options


def served_here(
    serve: Callable[..., None], options: Options, ask: Callable[[httpx.Client], Any]
) -> Any:
    """Run `serve(options, sock, announce=...)`; return what `ask` returns of the ready server.

    SIGTERM ends the server behind that. Raises what either raises. What the server sets of
    the process (its signal handler, how often threads switch, logging) is set back.
    """
    told: list[Any] = []

    def client(url: str) -> None:
        try:
            with httpx.Client(base_url=url, timeout=60) as http:
                told.append(ask(http))
        except BaseException as error:
            told.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before, interval = signal.getsignal(signal.SIGTERM), sys.getswitchinterval()
    thread: threading.Thread | None = None
    try:
        with socket.create_server(("127.0.0.1", 0)) as sock, kept_logging():
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            thread = threading.Thread(target=client, args=(url,))
            serve(options, sock, announce=lambda started: thread.start())
    finally:
        if thread is not None and thread.ident is not None:
            thread.join(60)  # its SIGTERM comes while the server's handler is there
        signal.signal(signal.SIGTERM, before)
        sys.setswitchinterval(interval)
    (answer,) = told
    if isinstance(answer, BaseException):
        raise answer
    return answer
