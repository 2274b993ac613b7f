"""Placement groups follow from the sizes and the hosts; what does not fit is said at once."""

import pytest

from serving.cluster.ray.groups import Group, HostRoom, groups_of, hosts_of_instance

EIGHT = [HostRoom(f"10.0.0.{n}", 8, 96) for n in (1, 2)]
CPUS = [HostRoom(f"10.0.0.{n}", 0, 1) for n in (1, 2)]


def test_instances_lie_inside_a_host_where_they_fit():
    groups = groups_of(4, 4, 1, 0, EIGHT)
    assert [group.name for group in groups] == [f"instance {n}" for n in range(4)]
    assert {group.strategy for group in groups} == {"PACK"}
    assert groups[0].bundles == [{"GPU": 4.0, "CPU": 1.0}]


def test_an_instance_that_is_too_large_for_a_host_is_spread():
    (group,) = groups_of(1, 16, 1, 0, EIGHT)
    assert group.strategy == "STRICT_SPREAD"
    assert group.bundles == [{"GPU": 8.0, "CPU": 1.0}] * 2
    assert hosts_of_instance(8, 2, EIGHT) == 2  # as --nnodes says


def test_ranks_of_the_lora_server_have_a_bundle_each():
    groups = groups_of(1, 8, 1, 2, EIGHT)
    assert [group.name for group in groups[1:]] == [f"rank of the LoRA Server {n}" for n in (0, 1)]
    assert [group.bundles for group in groups[1:]] == [[{"GPU": 1.0, "CPU": 1.0}]] * 2


def test_without_gpus_bundles_are_of_cpus():
    assert [group.bundles for group in groups_of(1, 2, 1, 1, CPUS)] == [[{"CPU": 1.0}]] * 2
    (group,) = groups_of(1, 2, 2, 0, CPUS)
    assert (group.bundles, group.strategy) == ([{"CPU": 1.0}] * 2, "STRICT_SPREAD")


@pytest.mark.parametrize(
    ("sizes", "hosts", "message"),
    [
        ((1, 3, 2, 0), CPUS, "--tensor-parallel-size 3 must be a multiple of --nnodes 2"),
        ((1, 32, 1, 0), EIGHT, "--tensor-parallel-size 32 cannot be divided over the GPUs"),
        ((1, 9, 1, 0), EIGHT, "10.0.0.1: 8 GPUs, 96 CPUs; 10.0.0.2: 8 GPUs.*choose a smaller"),
        ((3, 8, 1, 0), EIGHT, "no room for instance 2: all roles take 24 GPUs and 3 CPUs"),
        ((2, 8, 1, 1), EIGHT, "no room for rank of the LoRA Server 0: all roles take 17 GPUs"),
        ((2, 4, 2, 0), CPUS, "no room for instance 1: all roles take 0 GPUs and 4 CPUs"),
        ((1, 3, 3, 0), CPUS, "on 3 hosts for this one.*add hosts"),
        ((1, 1, 1, 0), [], "Ray has no hosts"),
    ],
)
def test_what_does_not_fit_says_what_to_change(sizes, hosts, message):
    with pytest.raises(ValueError, match=message):
        groups_of(*sizes, hosts)


def test_large_roles_are_placed_before_small_ones():
    hosts = [HostRoom("a", 8, 8), HostRoom("b", 4, 8)]
    assert len(groups_of(1, 8, 1, 4, hosts)) == 5  # a rank on `a` first would leave no room
    assert Group("instance", 3, 1, 2).name == "instance 3"
