"""Hosts of a Ray cluster: what is asked of Ray, checked, and given back. Ray is a stand-in."""

import logging
import threading
from types import SimpleNamespace

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

ray = pytest.importorskip("ray")

from serving.api.config import EngineConfig  # noqa: E402
from serving.cluster.far import process  # noqa: E402
from serving.cluster.far.actor import AUTH, RoleActor  # noqa: E402
from serving.cluster.ray import hosts as module  # noqa: E402
from serving.cluster.ray.groups import INSTANCE, RANK, Group  # noqa: E402
from serving.cluster.ray.hosts import RayHosts, rooms  # noqa: E402

LOCAL = "127.0.0.1"
TWO_HOSTS, A_RANK = Group(INSTANCE, 0, 2, 8), Group(RANK, 0, 1, 1)


class StandInActor:
    """An actor: its calls run in the thread that asks for the answer."""

    def __init__(self, options):
        self.options, self.role, self.is_killed = options, RoleActor(), threading.Event()

    def __getattr__(self, name):
        def call(*args):
            return lambda: (self.wait_killed if name == "run" else getattr(self.role, name))(*args)

        return SimpleNamespace(remote=call)

    def wait_killed(self, *args):
        assert self.is_killed.wait(200)
        raise ray.exceptions.RayActorError()


class StandInGroup:
    """A placement group: one bundle on each node."""

    def __init__(self, cluster, bundles, strategy, name):
        self.cluster, self.asked, self.is_there = cluster, (bundles, strategy, name), True

    def wait(self, limit_s):
        self.cluster.events.append("wait")
        return self.cluster.has_room


class StandInRay:
    """A cluster of two nodes on this host."""

    def __init__(self):
        self.events, self.groups, self.actors, self.left = [], [], [], 0
        self.has_room, self.answers, self.kills = True, True, True
        self.addresses = [LOCAL, "127.0.0.2"]

    def nodes(self):
        resources = [{"GPU": 8.0, "CPU": 96.0}, {"CPU": 4.0}, {}]
        return [
            {"NodeID": f"n{i}", "NodeManagerAddress": a, "Alive": i < 2, "Resources": resources[i]}
            for i, a in enumerate([*self.addresses, "127.0.0.9"])
        ]

    def group(self, bundles, strategy, name):
        self.events.append("ask")
        self.groups.append(StandInGroup(self, bundles, strategy, name))
        return self.groups[-1]

    def table(self, group):
        return {"bundles_to_node_id": {i: f"n{i}" for i in range(len(group.asked[0]))}}

    def remove(self, group):
        assert group.is_there, "given back twice"
        group.is_there = False
        raise ray.exceptions.RaySystemError("the group is gone already")  # costs nothing

    def remote(self, cls):
        assert cls is RoleActor

        def start(options):
            self.actors.append(StandInActor(options))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **o: SimpleNamespace(remote=lambda: start(o)))

    def get(self, calls, timeout=None):
        if not self.answers:
            raise ray.exceptions.GetTimeoutError("Get timed out:\nno answer")
        return [call() for call in calls] if isinstance(calls, list) else calls()

    def kill(self, actor, no_restart):
        assert no_restart
        if self.kills:
            actor.is_killed.set()

    def shutdown(self):
        self.left += 1


@pytest.fixture
def cluster(monkeypatch):
    made = StandInRay()
    for name in ("nodes", "get", "remote", "kill", "shutdown"):
        monkeypatch.setattr(ray, name, getattr(made, name))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: LOCAL)
    monkeypatch.setattr(module, "placement_group", made.group)
    monkeypatch.setattr(module, "placement_group_table", made.table)
    monkeypatch.setattr(module, "remove_placement_group", made.remove)
    monkeypatch.setattr(
        module,
        "PlacementGroupSchedulingStrategy",
        lambda group, placement_group_bundle_index: (group, placement_group_bundle_index),
    )
    monkeypatch.setattr(process, "_KILL_S", 60.0)  # a late watch is no lost host
    monkeypatch.setenv(AUTH, "token")
    yield made
    for actor in made.actors:
        actor.is_killed.set()


@pytest.fixture
def config(tmp_path):
    tiny_checkpoint.write_model(tmp_path / "model", TinyShape(layers=1))
    return EngineConfig(str(tmp_path / "model"))


@pytest.fixture
def hosts(cluster, config):
    made = RayHosts([TWO_HOSTS, A_RANK], config, {"A": "b"})
    yield made
    made.close()
    made.close()
    assert cluster.left == 1
    assert not any(group.is_there for group in cluster.groups)
    with pytest.raises(ConnectionError, match="cluster is closed"):
        made.instance(0)


def test_every_role_has_a_group_and_each_bundle_an_actor(cluster, config, hosts):
    assert cluster.events[:3] == [
        "ask",
        "ask",
        "wait",
    ]  # all are asked for before one is waited for
    gpus = [{"GPU": 8.0, "CPU": 1.0}] * 2, [{"GPU": 1.0, "CPU": 1.0}]
    assert [group.asked for group in cluster.groups] == [
        (gpus[0], "STRICT_SPREAD", "instance 0"),
        (gpus[1], "PACK", "rank of the LoRA Server 0"),
    ]
    first, second = cluster.groups
    placed = [actor.options["scheduling_strategy"] for actor in cluster.actors]
    assert placed == [(first, 0), (first, 1), (second, 0)]
    assert [actor.options["num_gpus"] for actor in cluster.actors] == [8, 8, 1]
    for actor in cluster.actors:
        assert (actor.options["max_restarts"], actor.options["max_task_retries"]) == (0, 0)
        assert actor.options["max_concurrency"] > 1  # `run` lasts; questions are answered meanwhile
    assert [host.where for host in hosts.instance(0)] == cluster.addresses
    assert hosts.server_rank(0).address == LOCAL
    assert not hosts.answer_here


def test_a_role_that_starts_again_gets_new_actors_in_its_group(cluster, hosts):
    first, again = hosts.instance(0), hosts.instance(0)
    assert len(cluster.groups) == 2
    assert [host.actor for host in again] == cluster.actors[3:]
    assert not {host.actor for host in again} & {host.actor for host in first}
    assert 1024 <= again[0].free_port() < 65536
    cluster.answers = False
    with pytest.raises(ConnectionError, match="Ray runs no actor of this command on some host: no"):
        again[0].free_port()
    cluster.answers = True


def test_a_process_that_ends_leaves_its_host_and_its_connections_end(cluster, hosts):
    host, _ = hosts.instance(0)
    ours, ticket = host.pipe()
    running = host.process(print, (ticket,), "role")
    running.start()
    running.kill()
    running.join(60)
    assert ours.poll(60)
    with pytest.raises(EOFError):
        ours.recv_bytes()
    ours.close()
    running.close()
    hosts.instance(0)
    assert len(cluster.groups) == 2


def test_a_host_that_is_lost_is_given_up_and_another_one_asked_for(
    cluster, hosts, caplog, monkeypatch
):
    monkeypatch.setattr(process, "_KILL_S", 0.05)
    cluster.kills = False
    both = hosts.instance(0)
    for host in both:  # the group is given up once
        running = host.process(print, (), "role")
        running.start()
        running.kill()
        running.join(60)
        assert not running.is_alive()
    assert "The host of instance 0 does not answer." in caplog.text
    assert [group.is_there for group in cluster.groups] == [False, True]
    hosts.instance(0)
    assert cluster.groups[2].asked == cluster.groups[0].asked
    assert hosts.server_rank(0).actor.options["scheduling_strategy"] == (cluster.groups[1], 0)


def test_a_role_without_room_is_named_and_the_cluster_left(cluster, config):
    cluster.has_room = False
    with pytest.raises(ConnectionError, match=r"no room for instance 0 .*'GPU': 8.0.* within 60 s"):
        RayHosts([TWO_HOSTS, A_RANK], config, {})
    assert cluster.left == 1
    assert [group.is_there for group in cluster.groups] == [False, False]


def test_a_host_of_another_release_or_guard_is_refused(cluster, config, monkeypatch):
    about = RoleActor.about

    def other(actor, given):
        return about(actor, given) | {"version of jax": "9.9"}

    monkeypatch.setattr(RoleActor, "about", other)
    with pytest.raises(ConnectionError, match=r"version of jax is '9.9' there .*same release"):
        RayHosts([A_RANK], config, {})
    monkeypatch.setattr(RoleActor, "about", lambda actor, given: {"why": "no config.json"})
    with pytest.raises(ConnectionError, match=r"Host 127\.0\.0\.1 does not fit: no c"):
        RayHosts([A_RANK], config, {})
    monkeypatch.setattr(RoleActor, "about", about)
    monkeypatch.setenv(AUTH, "disabled")
    with pytest.raises(ConnectionError, match="RAY_AUTH_MODE is 'disabled' there and 'token'"):
        RayHosts([A_RANK], config, {})
    RayHosts([A_RANK], config, {}, needs_tokens=False).close()
    assert cluster.left == 4


def test_a_folder_that_a_host_does_not_see_is_refused(cluster, hosts, tmp_path, monkeypatch):
    shared = tmp_path / "state"
    shared.mkdir()
    hosts.require_folder(str(shared))
    sees = RoleActor.sees
    blind = cluster.actors[1].role

    def seen(actor, path, content):
        return actor is not blind and sees(actor, path, content)

    monkeypatch.setattr(RoleActor, "sees", seen)
    with pytest.raises(ConnectionError, match=r"not seen by host 127.0.0.2\. .*--state-dir"):
        hosts.require_folder(str(shared))
    assert not list(shared.iterdir())


def test_rooms_are_those_of_the_living_hosts(cluster):
    assert [str(room) for room in rooms()] == [
        "127.0.0.1: 8 GPUs, 96 CPUs",
        "127.0.0.2: 0 GPUs, 4 CPUs",
    ]


def test_the_log_says_where_roles_are(cluster, config, caplog):
    with caplog.at_level(logging.INFO):
        RayHosts([TWO_HOSTS], config, {}).close()
    assert "Ray has placed instance 0 on 127.0.0.1, 127.0.0.2." in caplog.text
