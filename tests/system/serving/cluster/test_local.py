"""Requirements of a cluster and restarts of its processes; the roles are stand-ins."""

import dataclasses
import os
import tempfile
import threading
from typing import ClassVar

import pytest
from support.cases import lora_server_cases as cases
from support.waiting import wait_until

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cli.flag_values import LoraModuleFlag
from serving.cli.options import Options
from serving.cluster import local
from serving.cluster.addresses import FarAddress
from serving.cluster.local import LocalCluster
from serving.cluster.server_place import server_spec
from serving.http.settings import HttpSettings, KeyLimits
from serving.runtime import socket_folder
from serving.runtime.child_process import Pulse
from serving.runtime.role_host import OneHost


def test_no_folder_is_left_where_the_roles_are_not_prepared(engine, monkeypatch, tmp_path):
    monkeypatch.setattr(socket_folder, "_LONGEST_PATH", 1000)  # no socket is made
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local, "journal_of", lambda options: 1 / 0)
    options = Options(engine, HttpSettings(), ClusterConfig(instances=2))
    with pytest.raises(ZeroDivisionError):
        LocalCluster(options, None)
    assert not os.listdir(tmp_path)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    model, _ = cases.write_files(tmp_path_factory.mktemp("local"), 0)
    return EngineConfig(model=model, **cases.ENGINE)


class Role:
    """An instance that is there at once; `die` ends it as a kill does."""

    made: tuple = ()
    pid = os.getpid()
    fail_from = 99  # the number of the start that fails
    read: ClassVar[dict] = {}  # digests of adapters, by instance, where they are others

    def __init__(self, options, number, path, place, serve_leases, hosts):
        self.number, self.place, self.is_ready, self.stopped = number, place, False, False
        self.path, self.hosts = path, hosts
        self.engine, self.adapters = options.engine, options.adapters
        self.digests = Role.read.get(number, {"a0": "aa", "a1": "bb"})
        self.sentinel, self._end = os.pipe()
        self.order = len(Role.made)
        Role.made = (*Role.made, self)

    def wait_ready(self):
        if self.order >= Role.fail_from:
            raise ConnectionError(f"Instance {self.number} did not start")
        self.is_ready = True

    def pulse(self, limit_s):
        return Pulse.UP

    def die(self):
        end, self._end = self._end, None  # first: the watch may stop us while we close
        if end is not None:
            os.close(end)

    kill = die

    def end_by_signal(self):
        return " (SIGKILL)"

    def stop(self, end_s=None):
        self.kill()
        if not self.stopped:
            os.close(self.sentinel)
        self.stopped = True


class Group:
    def __init__(self, spec, first_gpu, hosts, moved, members):
        self.spec, self.places, self.closed = spec, ("rank",), False
        self.members, self.worlds, self.killed = members, [], False
        if members is not None:
            self._begin()
        self.first_gpu = first_gpu
        self.coordinator = None

    def _begin(self):
        """Be rank 0 of the next world, as the keeper of a rank does."""
        number = self.members.enter("rank")
        self.members.place(number, "rank", None)
        self.members.hold(number, self)
        self.members.report_listening(number, b"id %d" % number)
        self.worlds.append(number)

    def listen(self):
        pass

    def open(self):
        self.members.world(self.worlds[-1])

    def kill(self):
        self.killed = True
        if self.members is not None and len(self.worlds) < 5:
            threading.Thread(target=self._begin).start()

    def up(self):
        return [True]

    def close(self, end_s=None):
        self.closed = True


@pytest.fixture
def options(engine, monkeypatch):
    monkeypatch.setattr(local, "InstanceProcess", Role)
    monkeypatch.setattr(local, "ServerGroup", Group)
    monkeypatch.setattr(local, "_RESTART_S", 0.01)
    monkeypatch.setattr(Role, "made", ())
    monkeypatch.setattr(Role, "fail_from", 99)
    return Options(
        engine=engine,
        http=HttpSettings(),
        cluster=ClusterConfig(instances=2, lora_server=1),
        adapters=(LoraModuleFlag("a0", "x"), LoraModuleFlag("a1", "y")),
    )


def test_a_dead_instance_is_started_anew(options):
    cluster = LocalCluster(options, server_spec(options.engine, options.cluster))
    first = cluster.processes
    assert sorted(cluster.router.instance_of) == ["a0", "a1"]
    assert first[0].place.ranks == ("rank",)
    assert cluster.roles() == {"instances": [True, True], "ranks": [True]}
    first[1].die()
    wait_until(lambda: cluster.processes[1] is not first[1] and cluster.router.up == (0, 1))
    assert first[1].stopped
    assert cluster.processes[0] is first[0]
    assert [module.digest for module in first[1].adapters] == ["", ""]
    again = cluster.processes[1]  # which serves the files of the others, or none
    assert [(m.name, m.digest) for m in again.adapters] == [("a0", "aa"), ("a1", "bb")]
    folder = os.path.dirname(cluster.paths[0])
    assert os.path.exists(folder)
    cluster.close()
    cluster.close()
    assert all(role.stopped for role in Role.made)
    assert cluster.group.closed
    assert not os.path.exists(folder)


def test_instances_that_have_read_different_files_do_not_start(options, monkeypatch):
    monkeypatch.setattr(Role, "read", {1: {"a0": "aa", "a1": "cc"}})
    with pytest.raises(ConnectionError, match="Adapter 'a1': its files have changed while"):
        LocalCluster(options, server_spec(options.engine, options.cluster))
    assert all(role.stopped for role in Role.made)


def test_all_members_of_a_world_are_started_anew_with_one_of_them(options):
    config = ClusterConfig(instances=2, lora_server=1, lora_server_transport="nvshmem")
    options = dataclasses.replace(options, cluster=config)
    cluster = LocalCluster(options, server_spec(options.engine, options.cluster))
    first = cluster.processes
    assert [role.place.world.id for role in first] == [b"id 0", b"id 0"]
    pes = [role.place.world.pe_of_instance(role.place.instance) for role in first]
    assert pes == [1, 2]
    first[1].die()
    wait_until(lambda: not set(first) & set(cluster.processes) and cluster.router.up == (0, 1))
    assert cluster.group.killed
    assert [role.place.world.id for role in cluster.processes] == [b"id 1", b"id 1"]
    assert len(Role.made) == 4
    cluster.close()
    assert all(role.stopped for role in Role.made)


def test_a_member_that_cannot_start_ends_the_wait_of_the_others(options, monkeypatch):
    config = ClusterConfig(instances=2, lora_server=1, lora_server_transport="nvshmem")
    options = dataclasses.replace(options, cluster=config)
    monkeypatch.setattr(Role, "fail_from", 1)
    with pytest.raises(ConnectionError, match="Instance 1 did not start"):
        LocalCluster(options, server_spec(options.engine, options.cluster))
    assert all(role.stopped for role in Role.made)


def test_an_instance_that_leaves_at_the_end_is_not_replaced(options):
    cluster = LocalCluster(options, None)
    cluster.replace_no_more()
    cluster.processes[0].die()
    cluster.close()
    assert len(Role.made) == 2


def test_an_instance_that_does_not_come_back_is_tried_again(options, monkeypatch):
    cluster = LocalCluster(options, None)
    monkeypatch.setattr(Role, "fail_from", 2)
    cluster.processes[0].die()
    wait_until(lambda: len(Role.made) > 4)
    assert cluster.router.up == (1,)
    monkeypatch.setattr(Role, "fail_from", 99)
    wait_until(lambda: cluster.router.up == (0, 1))
    cluster.close()
    assert all(role.stopped for role in Role.made)


def test_a_role_that_cannot_start_ends_all_others(options, monkeypatch):
    monkeypatch.setattr(Role, "fail_from", 1)
    with pytest.raises(ConnectionError, match="Instance 1 did not start"):
        LocalCluster(options, None)
    assert len(Role.made) == 2
    assert all(role.stopped for role in Role.made)


def test_the_last_instance_has_the_merged_adapter_and_the_others_all(options):
    engine = dataclasses.replace(options.engine, merge_adapter="a1", lora_merge="auto")
    cluster = LocalCluster(
        dataclasses.replace(options, engine=engine, cluster=ClusterConfig(instances=2)), None
    )
    kinds = [(role.engine.merge_adapter, role.engine.lora_merge) for role in Role.made]
    assert kinds == [(None, "auto"), ("a1", "off")]
    assert cluster.router.choose("a1") == 1
    assert cluster.router.choose("a0") == cluster.router.choose(None) == 0
    cluster.close()


class FarHosts(OneHost):
    """Hosts of which some may not be there, or not see a folder."""

    answer_here = False

    def __init__(self, sees=True):
        self.sees, self.gone, self.folders, self.closed = sees, 0, [], False

    def require_folder(self, folder):
        self.folders.append(folder)
        if not self.sees:
            raise ConnectionError(f"a host does not see {folder}")

    def instance(self, number):
        if self.gone:
            self.gone -= 1
            raise ConnectionError("no room")
        return ("host",)

    def close(self):
        self.closed = True


def test_what_instances_of_other_hosts_share_is_in_a_folder_that_all_see(options, tmp_path):
    lenient = dataclasses.replace(options, http=HttpSettings(enable_runtime_lora=True))
    (tmp_path / "state").mkdir(mode=0o700)
    lenient = dataclasses.replace(lenient, state_dir=str(tmp_path / "state"))
    hosts = FarHosts()
    cluster = LocalCluster(lenient, None, hosts)
    budgets, lock = sorted((tmp_path / "state").glob("budgets-*"))
    assert budgets.is_dir()
    assert hosts.folders == [str(tmp_path / "state")]
    cluster.close()
    assert not budgets.exists()
    assert not lock.exists()
    assert hosts.closed
    LocalCluster(options, None, hosts := FarHosts()).close()
    assert not hosts.folders  # nothing is shared


def test_a_folder_that_cannot_be_shared_is_named_and_nothing_is_left(
    options, tmp_path, monkeypatch
):
    monkeypatch.setattr(socket_folder, "_LONGEST_PATH", 1000)  # no socket is made
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "file").touch()
    limited = HttpSettings(api_keys=("key",), key_limits=KeyLimits(tokens_per_minute=5))
    limited = dataclasses.replace(options, http=limited, state_dir=str(tmp_path / "new" / "state"))
    with pytest.raises(ConnectionError, match="does not see"):
        LocalCluster(limited, None, FarHosts(sees=False))
    LocalCluster(limited, None, FarHosts()).close()  # the folder is made
    under_file = dataclasses.replace(limited, state_dir=str(tmp_path / "file" / "state"))
    with pytest.raises(ConnectionError, match=r"--state-dir .*/file/state: Not a dir"):
        LocalCluster(under_file, None, FarHosts())
    assert not list((tmp_path / "temporary").iterdir())


def test_an_instance_without_a_host_is_tried_again_and_has_a_new_address(
    options, monkeypatch, caplog
):
    hosts = FarHosts()
    where = FarAddress("10.0.0.2", 7, "s")
    cluster = LocalCluster(options, None, hosts)
    try:
        wait_ready = Role.wait_ready

        def at_another_port(role):
            wait_ready(role)
            role.path = where

        monkeypatch.setattr(Role, "wait_ready", at_another_port)
        hosts.gone = 3
        Role.made[0].die()
        wait_until(lambda: len(Role.made) == 3 and cluster.paths[0] == where)
        wait_until(lambda: 0 in cluster.router.up)
        assert caplog.text.count("Instance 0 cannot start now: no room") == 1
        assert caplog.text.count("Instance 0 has ended (SIGKILL); restarting it") == 1
        assert cluster.roles() == {"instances": [True, True]}
        cluster._end_instances()  # as when the LoRA Server's memory has moved
        wait_until(lambda: len(Role.made) == 5)
    finally:
        cluster.close()
