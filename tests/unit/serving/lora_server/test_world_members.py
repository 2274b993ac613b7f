"""Members of a world begin together, end together, and are even over hosts."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from serving.lora_server.world_members import WorldMembers, instance_member, rank_member

RANKS, INSTANCES = 2, 2
ALL = (*map(rank_member, range(RANKS)), *map(instance_member, range(INSTANCES)))


class Process:
    """Counts kills."""

    def __init__(self):
        self.kills = 0

    def kill(self):
        self.kills += 1
        raise ValueError("a closed handle is no error")


def entered(members, addresses=(None, None, None, None)):
    """Let all members enter; return the world's number and their processes."""
    (number,) = {members.enter(name) for name in ALL}
    processes = [Process() for _ in ALL]
    for name, process, address in zip(ALL, processes, addresses, strict=True):
        members.place(number, name, address)
        members.hold(number, process)
    return number, processes


def listening(members, number, name=b"id"):
    for rank in range(RANKS):
        members.report_listening(number, name if rank == 0 else b"")


@pytest.fixture
def members():
    made = WorldMembers(RANKS, INSTANCES)
    yield made
    made.close()


def test_the_id_is_given_when_all_ranks_listen(members):
    number, _ = entered(members)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(members.world, number)
        members.report_listening(number, b"id")
        assert not wait([told], timeout=0.1).done
        members.report_listening(number)
        world = told.result(60)
    assert (world.id, world.size, world.one_host) == (b"id", 4, True)
    assert [world.pe_of_instance(n) for n in range(INSTANCES)] == [2, 3]
    assert "id" not in repr(world).replace("instances", "").replace("World", "")


def test_a_member_that_starts_anew_ends_all_others(members):
    first, before = entered(members)
    listening(members, first)
    second = members.enter(ALL[3])
    assert second == first + 1
    assert [process.kills for process in before] == [1, 1, 1, 1]
    assert members.enter(ALL[0]) == second  # it was ended by that, and follows
    late = Process()
    members.hold(first, late)  # it was starting meanwhile
    assert late.kills == 1
    with pytest.raises(ConnectionError, match="all of them start anew"):
        members.world(first)
    members.report_listening(first, b"old")
    for name in ALL[1:3]:
        assert members.enter(name) == second
    for name in ALL:
        members.place(second, name, None)
    listening(members, second, b"new")
    assert members.world(second).id == b"new"


def test_a_wait_ends_with_its_world(members):
    number, _ = entered(members)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(members.world, number) for _ in range(2)]
        members.enter(ALL[1])
        for wait in waits:
            with pytest.raises(ConnectionError, match="start anew"):
                wait.result(60)


def test_a_member_without_a_host_ends_nobody(members):
    number = members.enter(ALL[0])
    members.leave(number, ALL[0])
    assert members.enter(ALL[0]) == number


def test_the_end_wakes_everybody():
    members = WorldMembers(RANKS, INSTANCES)
    number, _ = entered(members)
    ended = threading.Event()

    def wait():
        with pytest.raises(ConnectionError):
            members.world(number)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    members.close()
    assert ended.wait(60)
    thread.join()
    late = Process()
    members.hold(number, late)
    assert late.kills == 1


@pytest.mark.parametrize(
    ("addresses", "one_host"),
    [(("a", "a", "a", "a"), True), (("a", "b", "a", "b"), False), (("a", "b", "c", "d"), False)],
)
def test_hosts_with_as_many_members_each_are_taken(members, addresses, one_host):
    number, _ = entered(members, addresses)
    assert members.is_one_host(number) is one_host


def test_hosts_with_different_numbers_of_members_are_refused(members):
    number, _ = entered(members, ("a", "b", "b", "b"))
    with pytest.raises(ConnectionError, match=r"there are 1 on a, 3 on b .*--data-parallel-size"):
        members.is_one_host(number)
