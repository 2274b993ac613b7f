"""The server's loop: in turn, several under way, refusals, and an end."""

import threading
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.transport_cases import (
    batch,
    bits,
    exact_deltas,
    exchange,
    open_client,
    open_servers,
    terms_of,
)

from serving.lora_server.transport.base import Request
from serving.lora_server.transport.serve import serve

LONG = 60


class Lent:
    """A server of prepared requests that aborts itself behind the last."""

    def __init__(self, num_requests: int):
        x, ids = np.zeros((4, 2), np.float32), np.zeros(4, np.int32)
        self.coming = [Request(n, 1, 1, 0, 0, 4, 0, x, ids, ids) for n in range(num_requests)]
        self.said: list[tuple] = []
        self.waited: list[float] = []

    def receive(self, seconds: float) -> Request | None:
        self.waited.append(seconds)
        return self.coming.pop(0) if self.coming else None

    def aborted(self) -> bool:
        return not self.coming

    def respond(self, request: Request, deltas: Sequence[np.ndarray]) -> bool:
        self.said.append(("respond", request.client, [type(delta) for delta in deltas]))
        return request.client != 1  # which has gone

    def refuse(self, request: Request) -> bool:
        self.said.append(("refuse", request.client))
        return True


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_all_are_answered_in_their_order(depth):
    server, computed, most = Lent(6), [], []

    def compute(request):
        computed.append(request.client)
        most.append(len(computed) - len(server.said))
        return None if request.client == 3 else [request.x]

    assert serve(server, compute, depth=depth) == 5  # type: ignore[arg-type]
    assert computed == list(range(6))
    assert [said[1] for said in server.said] == list(range(6))
    assert [said for said in server.said if said[0] == "refuse"] == [("refuse", 3)]
    assert max(most) == depth
    assert server.waited[0] > 0
    assert set(server.waited[1:-1]) <= {0, 0.1}


def test_an_error_ends_the_loop():
    with pytest.raises(RuntimeError, match="broken"):
        serve(Lent(2), lambda request: (_ for _ in ()).throw(RuntimeError("broken")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depth must be at least 1"):
        serve(Lent(2), lambda request: None, depth=0)  # type: ignore[arg-type]


def test_results_of_a_device_are_sent(tmp_path):
    terms = terms_of(ep=1)

    def compute(request):
        return [jnp.asarray(delta) for delta in exact_deltas(request, terms.shapes)]

    with open_servers("in_process", terms, tmp_path) as servers:
        client = open_client("in_process", terms, servers, tmp_path)
        thread = threading.Thread(target=serve, args=(servers[0], compute))
        thread.start()
        x, ys, rows = batch(terms, np.random.default_rng(0), 24, base_share=0.0)
        got, status = exchange(client)(x, ys, rows)
        assert not np.asarray(status).any()
        assert bits(got[0]) != bits(ys[0])
        servers[0].abort()
        thread.join(LONG)
        assert not thread.is_alive()
        client.close()
