"""Roles take turns over the nodes, and each has GPUs of its own there."""

from serving.cluster.nodes.seats import INSTANCE, RANK, Seat, seats_of


def test_nodes_take_turns_and_roles_of_a_node_share_no_gpu():
    assert seats_of(instances=3, devices=2, ranks=3, nodes=2) == {
        (INSTANCE, 0): (Seat(0, 0, 2),),
        (INSTANCE, 1): (Seat(1, 0, 2),),
        (INSTANCE, 2): (Seat(0, 2, 2),),
        (RANK, 0): (Seat(1, 2, 1),),
        (RANK, 1): (Seat(0, 4, 1),),
        (RANK, 2): (Seat(1, 3, 1),),
    }


def test_every_node_has_a_role_where_there_are_enough():
    for nodes in range(2, 6):
        for instances in range(1, 6):
            seats = seats_of(instances, 1, max(0, nodes - instances), nodes)
            assert {seat.node for some in seats.values() for seat in some} == set(range(nodes))


def test_an_instance_that_is_alone_is_on_all_nodes():
    assert seats_of(instances=1, devices=6, ranks=0, nodes=3) == {
        (INSTANCE, 0): (Seat(0, 0, 2), Seat(1, 0, 2), Seat(2, 0, 2))
    }


def test_an_instance_that_has_ranks_beside_it_is_on_one_node():
    assert [len(some) for some in seats_of(1, 2, 1, 2).values()] == [1, 1]
    assert [len(some) for some in seats_of(2, 2, 1, 2).values()] == [1, 1, 1]
