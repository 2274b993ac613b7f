"""Client handling of absent servers, for any kind of slot memory."""

import pytest
from support.cases.transport_cases import terms_of

from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.client_base import FIRST_LIMIT, AbstractClientBase

SHAPES = terms_of(ep=1).shapes


class Client(AbstractClientBase[int]):
    """Servers are names; those in `there` let it in."""

    def __init__(self, shapes, connectors, there):
        super().__init__(shapes, connectors)
        self.there, self.joined, self.limits = there, [], []
        self._join_all()

    def _join(self, server):
        if server not in self.there:
            raise TransportError(f"server {server} is not there")
        self.joined.append(server)

    def _limit(self, nanoseconds):
        self.limits.append(nanoseconds)

    def lost(self):
        return tuple(n for n in range(self.servers) if n not in self.joined)

    def close(self):
        self._closed = True

    push = wait_add = abort = stats = grouped = None


def test_all_servers_are_joined_under_the_first_limit():
    client = Client(SHAPES, [0, 1, 2], {0, 1, 2})
    assert client.joined == [0, 1, 2]
    assert client.limits == [int(FIRST_LIMIT * 1e9)]
    for bad in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="bounded by more than 0 seconds"):
            client.set_limit(bad)


def test_nothing_is_kept_if_one_is_not_there():
    made = []

    class Seen(Client):
        def close(self):
            made.append(self)
            super().close()

    with pytest.raises(TransportError, match="server 1 is not there"):
        Seen(SHAPES, [0, 1], {0})
    assert made[0]._closed


def test_who_comes_back_is_joined_again_unless_the_client_is_closed():
    client = Client(SHAPES, [0, 1, 2], {0, 1, 2})
    client.joined, client.there = [1], {2}
    assert client.rejoin() == (0,)
    client.close()
    client.there = {0}
    assert client.rejoin() == (0,)
