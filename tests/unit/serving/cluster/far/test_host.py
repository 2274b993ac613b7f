"""A host elsewhere drops the connections that it has made for a process."""

from serving.cluster.far.host import AbstractFarHost


class Board:
    def __init__(self):
        self.tickets, self.dropped = 0, []

    def ticket(self):
        self.tickets += 1
        return f"ours {self.tickets}", f"ticket {self.tickets}"

    def drop(self, ticket):
        self.dropped.append(ticket)


class Host(AbstractFarHost):
    def process(self, target, args, name):
        raise NotImplementedError

    def free_port(self):
        raise NotImplementedError


def test_its_connections_are_the_boards_and_end_with_the_process():
    board = Board()
    host = Host("10.0.0.2", board)
    assert (host.address, host.has_own_gpus) == ("10.0.0.2", True)
    assert [host.pipe() for _ in range(2)] == [("ours 1", "ticket 1"), ("ours 2", "ticket 2")]
    assert board.dropped == []
    host._drop_pipes()
    assert board.dropped == ["ticket 1", "ticket 2"]
