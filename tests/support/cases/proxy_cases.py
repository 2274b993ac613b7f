"""A client of a front over instances on Unix sockets."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from support.doubles.noting_instance import Instance
from support.processes.http_server import listening, serve_app

from serving.cluster.proxy import Proxy
from serving.cluster.router import Router


@contextlib.contextmanager
def client_of_front(
    instances: Sequence[Instance], router: Router, folder: Path
) -> Iterator[httpx.Client]:
    """Serve instances and their front, whose sockets lie in `folder`, and give a client of it."""
    paths = [folder / f"i{n}" for n in range(len(instances))]
    with contextlib.ExitStack() as stack:
        for app, path in zip(instances, paths, strict=True):
            stack.enter_context(listening(app, path))
        front = Proxy([str(p) for p in paths], router, ["base"])
        url = stack.enter_context(serve_app(front))
        yield stack.enter_context(httpx.Client(base_url=url, timeout=30))
