"""Placement groups of a cluster's roles, computed from its sizes and the hosts. No jax, no ray."""

import dataclasses
from collections.abc import Sequence

INSTANCE, RANK = "instance", "rank of the LoRA Server"


@dataclasses.dataclass(frozen=True)
class HostRoom:
    """A host of the cluster, with all that Ray may give away there."""

    address: str
    gpus: float
    cpus: float

    def __str__(self) -> str:
        return f"{self.address}: {self.gpus:g} GPUs, {self.cpus:g} CPUs"


@dataclasses.dataclass(frozen=True)
class Group:
    """One role: its bundles, each of them on a host of its own where there are several."""

    kind: str
    number: int
    hosts: int
    gpus: int  # of each host

    @property
    def name(self) -> str:
        """Name of the role in logs."""
        return f"{self.kind} {self.number}"

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray's bundles, one for each host."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return [gpus | {"CPU": 1.0} for _ in range(self.hosts)]

    @property
    def strategy(self) -> str:
        """Ray's strategy: bundles of one role are on different hosts."""
        return "STRICT_SPREAD" if self.hosts > 1 else "PACK"


def hosts_of_instance(devices: int, nnodes: int, hosts: Sequence[HostRoom]) -> int:
    """Return how many hosts an instance of so many devices is on: as few as have the GPUs.

    `nnodes` above 1 decides, and on machines without GPUs always. Raises ValueError for an instance
    that is too large, or does not divide.
    """
    if devices % nnodes:
        raise ValueError(
            f"--tensor-parallel-size {devices} must be a multiple of --nnodes {nnodes}: each host "
            "has an equal part of the devices."
        )
    if nnodes > 1 or not any(host.gpus for host in hosts):
        return nnodes
    for count in range(1, len(hosts) + 1):
        fit = [host for host in hosts if host.gpus >= devices / count]
        if devices % count == 0 and len(fit) >= count:
            return count
    raise ValueError(
        f"--tensor-parallel-size {devices} cannot be divided over the GPUs of the cluster "
        f"({_told(hosts)}): choose a smaller one, or add hosts."
    )


def groups_of(
    instances: int, devices: int, nnodes: int, ranks: int, hosts: Sequence[HostRoom]
) -> list[Group]:
    """Return the groups of all roles. Raises ValueError when they do not fit on the hosts."""
    has_gpus = any(host.gpus for host in hosts)
    count = hosts_of_instance(devices, nnodes, hosts)
    gpus = devices // count if has_gpus else 0
    groups = [Group(INSTANCE, number, count, gpus) for number in range(instances)]
    groups += [Group(RANK, number, 1, int(has_gpus)) for number in range(ranks)]
    _require_room(groups, hosts)
    return groups


def _require_room(groups: Sequence[Group], hosts: Sequence[HostRoom]) -> None:
    """Raise ValueError unless each group has its hosts, the largest ones placed first."""
    left = {n: [host.gpus, host.cpus] for n, host in enumerate(hosts)}
    for group in sorted(groups, key=lambda group: (-group.hosts, -group.gpus)):
        fit = [n for n, (gpus, cpus) in left.items() if gpus >= group.gpus and cpus >= 1]
        fit.sort(key=lambda n: left[n])  # the fullest host that has room
        if len(fit) < group.hosts:
            gpus = sum(group.hosts * group.gpus for group in groups)
            processes = sum(group.hosts for group in groups)
            raise ValueError(
                f"There is no room for {group.name}: all roles take {gpus} GPUs and {processes} "
                f"CPUs, in parts of {group.gpus} GPUs and a CPU on {group.hosts} hosts for this "
                f"one, and Ray has {_told(hosts)}. Lower --tensor-parallel-size, "
                "--data-parallel-size or --lora-server, or add hosts."
            )
        for n in fit[: group.hosts]:
            left[n][0] -= group.gpus
            left[n][1] -= 1


def _told(hosts: Sequence[HostRoom]) -> str:
    return "; ".join(map(str, hosts)) or "no hosts"
