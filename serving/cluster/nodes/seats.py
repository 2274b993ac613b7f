"""Nodes and GPUs of the roles that are spread over the hosts of --nnodes. No jax."""

import dataclasses

INSTANCE, RANK = "instance", "rank"
Role = tuple[str, int]  # kind and number


@dataclasses.dataclass(frozen=True)
class Seat:
    """Place of a role: its node, and its part of the GPUs that the node's command sees."""

    node: int
    first_gpu: int
    num_gpus: int


def seats_of(instances: int, devices: int, ranks: int, nodes: int) -> dict[Role, Seat]:
    """Return the place of each role: nodes take turns, first of instances, then of ranks.

    An instance has `devices` GPUs, a rank one.
    """
    used, seats = [0] * nodes, dict[Role, Seat]()
    roles = [((INSTANCE, number), devices) for number in range(instances)]
    roles += [((RANK, number), 1) for number in range(ranks)]
    for turn, (role, num_gpus) in enumerate(roles):
        node = turn % nodes
        seats[role] = Seat(node, used[node], num_gpus)
        used[node] += num_gpus
    return seats
