"""Nodes and GPUs of the roles that are on the hosts of --nnodes. No jax."""

import dataclasses

INSTANCE, RANK = "instance", "rank"
Role = tuple[str, int]  # kind and number


@dataclasses.dataclass(frozen=True)
class Seat:
    """Place of a role's process: its node, and its part of the GPUs that the node sees."""

    node: int
    first_gpu: int
    num_gpus: int


def seats_of(instances: int, devices: int, ranks: int, nodes: int) -> dict[Role, tuple[Seat, ...]]:
    """Return the places of each role's processes, that of its rank 0 first.

    An instance has `devices` GPUs, a rank one. A role that is alone has a process on every node;
    otherwise it has one process, and nodes take turns, first of instances, then of ranks.
    """
    if instances + ranks == 1:
        return {(INSTANCE, 0): tuple(Seat(node, 0, devices // nodes) for node in range(nodes))}
    used, seats = [0] * nodes, dict[Role, tuple[Seat, ...]]()
    roles = [((INSTANCE, number), devices) for number in range(instances)]
    roles += [((RANK, number), 1) for number in range(ranks)]
    for turn, (role, num_gpus) in enumerate(roles):
        node = turn % nodes
        seats[role] = (Seat(node, used[node], num_gpus),)
        used[node] += num_gpus
    return seats
